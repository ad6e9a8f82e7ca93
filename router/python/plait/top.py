"""`plait top`: a running server in the terminal."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request

from plait.errors import DONE, SettingsError
from plait.live_view import Values, View, read_values, view
from plait.output import say

_TIMEOUT_SECONDS = 10
_CLEAR = "\033[H\033[2J"


def top(url: str, key: str | None, seconds: float, count: int | None) -> int:
    """Show what happens every `seconds`, `count` times or until Ctrl-C. Raises `SettingsError` at a first failure."""
    before, began = _read(url, key), time.monotonic()
    try:
        while count is None or count > 0:
            time.sleep(seconds)
            values, now = _read(url, key), time.monotonic()
            _show(url, view(before, values, now - began))
            before, began = values, now
            count = None if count is None else count - 1
    except KeyboardInterrupt:
        pass
    return DONE


def _read(url: str, key: str | None) -> Values:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            return read_values(answer.read().decode())
    except urllib.error.HTTPError as error:
        advice = "give a key with --api-key-file" if error.code == 401 else "is it a server of Plait?"
        raise SettingsError(f"{url}/metrics answers {error.code}; {advice}") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"{url} cannot be reached: {error}; check --url, and that the server runs") from error


def _show(url: str, now: View) -> None:
    clear = _CLEAR if sys.stdout.isatty() else ""
    say(clear + "\n".join(lines(url, now)))


def lines(url: str, now: View) -> list[str]:
    """What is shown of one moment."""
    pages = ", ".join(f"{num} {state}" for state, num in sorted(now.pages.items()))
    return [
        f"{url}",
        f"  requests  {now.running} running, {now.waiting} waiting, {now.finished:.1f} finished/s",
        f"  tokens/s  {now.prefill_tokens:.0f} prefill, {now.decode_tokens:.0f} decode",
        f"  steps/s   {now.steps:.0f}, of {now.prefill_tokens_a_step:.1f} prefill and "
        f"{now.decode_tokens_a_step:.1f} decode tokens",
        f"  latency   {_ms(now.itl_p50)} p50 and {_ms(now.itl_p99)} p99 between tokens, "
        f"{_ms(now.ttft_p50)} p50 to the first",
        f"  KV pages  {pages}",
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
