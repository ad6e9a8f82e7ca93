"""A headless Chromium that opens pages, driven over its DevTools protocol by a pair of pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.05
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may be root's, whom the sandbox does not take
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
COMMANDS_FD, EVENTS_FD = 3, 4
"""Of the browser's ends of the pipes; messages are JSON and end with a zero byte."""


def find_chromium() -> str:
    """Its path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` brings it")
    return found


class Page:
    """A tab, with all that it asked for and complained of since it was opened."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        """URLs, in order."""
        self.problems: list[str] = []
        """Errors and warnings on the console, exceptions that nothing caught, what the policy kept out."""

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until the script's value is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.evaluate(script):
            assert time.monotonic() < deadline, (script, self.problems, self.evaluate("document.body.innerText"))
            time.sleep(LOOK_SECONDS)

    def text(self, selector: str) -> str:
        text: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
        return text

    def type_and_enter(self, selector: str, text: str) -> None:
        """As a user does at the keyboard."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
        self.call("Input.dispatchKeyEvent", type="keyUp", **enter)

    def heard(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])


class Browser:
    """A running one."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._events = os.fdopen(events, "rb", buffering=0)
        self._left = b""
        self._num_calls = 0
        self._pages: dict[str, Page] = {}

    def open(self, url: str) -> Page:
        """A new tab with this page, once it is loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Runtime", "Log", "Network", "Page"):
            page.call(f"{domain}.enable")
        page.call("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete'")
        return page

    def call(self, method: str, parameters: dict[str, object], session: str | None = None) -> dict[str, Any]:
        """What a command returns; events that come before go to their pages."""
        self._num_calls += 1
        command = {"id": self._num_calls, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._num_calls:
            if (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.heard(message["method"], message["params"])
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = self._events.read(65_536)
            assert piece, "the browser has ended"
            self._left += piece
        raw, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def close(self) -> None:
        self._commands.close()
        self._events.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the block."""
    program = find_chromium()
    # Its children may write there for a moment after its end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process, browser = _start(program, Path(profile))
        try:
            yield browser
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its renderers too
            process.wait()
            browser.close()


def _start(program: str, profile: Path) -> tuple[subprocess.Popen[bytes], Browser]:
    commands, own_commands = os.pipe()
    own_events, events = os.pipe()
    words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    # A shell gives the pipes the numbers that the browser expects.
    script = f'exec "$@" {COMMANDS_FD}<&{commands} {EVENTS_FD}>&{events}'
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", *words],
            pass_fds=(commands, events),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(commands)
    os.close(events)
    return process, Browser(own_commands, own_events)
