"""The admin listener of a running server."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait.cli import run
from plait_testing.held_port import held_port
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.slow_steps import SlowSteps

TIMEOUT = 120
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LONG = BODY | {"max_tokens": 4000, "stream": True}
API = {"authorization": "Bearer sk-models"}
OPERATOR = {"authorization": "Bearer sk-operator"}
ADMIN_LINE = "Admin listener: "


@dataclass(frozen=True)
class Both:
    server: Server
    admin: httpx.Client

    @property
    def admin_url(self) -> str:
        return str(self.admin.base_url).rstrip("/") + "/"

    def ask(self, **fields: object) -> httpx.Response:
        return httpx.post(self.server.url + COMPLETIONS, json=BODY | fields, headers=API, timeout=TIMEOUT)

    def ended(self, request_id: str) -> httpx.Response:
        headers = API | {"x-request-id": request_id}
        return httpx.post(self.server.url + COMPLETIONS, json=BODY, headers=headers, timeout=TIMEOUT)

    @contextlib.contextmanager
    def long_stream(self, request_id: str) -> Iterator[Iterator[str]]:
        headers = API | {"x-request-id": request_id}
        url = self.server.url + COMPLETIONS
        with httpx.Client(timeout=TIMEOUT) as client, client.stream("POST", url, json=LONG, headers=headers) as answer:
            yield answer.iter_lines()

    def requests(self) -> dict[str, dict[str, Any]]:
        return {call["id"]: call for call in self.admin.get("/admin/requests").json()["requests"]}

    def metric(self, name: str) -> float:
        lines = self.admin.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="module")
def both(check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("admin")
    for name, text in (("keys", "sk-models name=app"), ("operators", "sk-operator")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    own = (f"--api-key-file={folder / 'keys'}", "--admin-port=0", f"--admin-key-file={folder / 'operators'}")
    with recall_steps.of_servers():
        server = start_server(folder / "log", check_models / "recall-gqa", "--threads=1", "--max-seqs=8", *own)
    assert server.url, server.errors
    url = server.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE)
    with httpx.Client(base_url=url, headers=OPERATOR, timeout=TIMEOUT) as admin:
        yield Both(server, admin)
    server.kill()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_listener_has_its_own_keys(both: Both) -> None:
    answers = [
        httpx.get(both.admin_url + path, headers=API).status_code
        for path in ("metrics", "admin/info", "admin/settings", "openapi.json")
    ]
    assert answers == 4 * [401]
    assert both.admin.get("/metrics").text.endswith("# EOF\n")
    assert httpx.get(both.server.url + "/v1/models", headers=OPERATOR).status_code == 401
    assert httpx.get(both.server.url + "/admin/info", headers=API).status_code == 404


def test_it_tells_of_the_server_and_its_settings(both: Both) -> None:
    info = both.admin.get("/admin/info").json()
    assert info["url"] == both.server.url
    assert info["seconds"] > 0
    assert (info["model"]["model_id"], info["status"]["phase"]) == ("recall-gqa", "ready")
    settings = both.admin.get("/admin/settings").json()
    assert settings["scheduler"]["max_seqs"] == 8
    assert settings["pages"]["page_size"] == 64, "filled in at the start"


def test_a_live_request_is_listed_and_ended_by_its_id(both: Both, recall_steps: SlowSteps) -> None:
    with recall_steps.within(), both.long_stream("r-1") as lines:
        assert next(lines).startswith("data: {")
        call = both.requests()["r-1"]
        assert (call["path"], call["key"], call["state"]) == (COMPLETIONS, "app", "running")
        assert call["prompt_tokens"] > 0
        assert call["output_tokens"] > 0
        assert both.admin.delete("/admin/requests/r-1").json() == {"ended": 1}
        told = [line for line in lines if line]
    assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "ended_by_operator"
    wait_until(lambda: both.requests() == {})
    gone = both.admin.delete("/admin/requests/r-1")
    assert gone.status_code == 404
    assert "GET /admin/requests" in gone.json()["error"]["message"]


def test_paused_requests_wait_and_go_on(both: Both) -> None:
    assert both.admin.post("/admin/pause").json() == {"paused": True}
    wait_until(lambda: both.admin.get("/ready").status_code == 503)
    ready = httpx.get(both.server.url + "/ready")
    assert "paused" in ready.json()["error"]["message"]
    assert httpx.get(both.server.url + "/health").status_code == 200
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(both.ask)
        wait_until(lambda: [call["state"] for call in both.requests().values()] == ["waiting"])
        steps = both.metric("plait_steps_total")
        time.sleep(0.2)
        assert both.metric("plait_steps_total") == steps
        assert not answer.done()
        assert both.admin.post("/admin/resume").json() == {"paused": False}
        assert answer.result().status_code == 200
    both.server.wait_until_serving()


def test_a_request_that_waits_is_ended_with_a_status_that_clients_do_not_try_again(both: Both) -> None:
    both.admin.post("/admin/pause")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(both.ended, "r-0")
        wait_until(lambda: both.requests().get("r-0", {}).get("state") == "waiting")
        assert both.admin.delete("/admin/requests/r-0").json() == {"ended": 1}
        ended = answer.result()
    both.admin.post("/admin/resume")
    both.server.wait_until_serving()
    assert (ended.status_code, ended.json()["error"]["code"]) == (410, "ended_by_operator")
    assert "retry-after" not in ended.headers


def test_a_flushed_prefix_is_computed_again(both: Both) -> None:
    prompt = "b" * 300
    wait_until(lambda: both.ask(prompt=prompt).status_code == 200 and both.metric("plait_prefix_hit_tokens_total") > 0)
    hits = both.metric("plait_prefix_hit_tokens_total")
    assert both.admin.post("/admin/flush_prefix_cache").json() == {"flushed": True}
    wait_until(lambda: 'state="cached"} 0' in both.admin.get("/metrics").text)
    both.ask(prompt=prompt)
    assert both.metric("plait_prefix_hit_tokens_total") == hits
    both.ask(prompt=prompt)
    assert both.metric("plait_prefix_hit_tokens_total") > hits


def test_the_log_level_is_changed_while_it_runs(both: Both) -> None:
    assert both.admin.put("/admin/log_level", json={"level": "error"}).json() == {"level": "error"}
    both.admin.post("/admin/pause")
    both.admin.post("/admin/resume")
    wait_until(lambda: both.admin.get("/ready").status_code == 200)
    num_lines = both.server.errors.count("is going on")
    assert both.admin.put("/admin/log_level", json={"level": "info"}).status_code == 200
    both.admin.post("/admin/pause")
    both.admin.post("/admin/resume")
    wait_until(lambda: both.server.errors.count("is going on") == num_lines + 1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"level": "loud"}', "'loud'"),
        (b"{", "JSON"),
        (b'{"level": "info", "x": 1}', "`x`"),
        (b" " * 5000, "4096 bytes"),
        (b"\xff", "JSON object with level"),
    ],
)
def test_a_broken_body_is_refused_with_what_is_allowed(both: Both, body: bytes, problem: str) -> None:
    answer = both.admin.put("/admin/log_level", content=body)
    assert answer.status_code in (400, 413)
    assert problem in answer.json()["error"]["message"]


def test_pages_need_no_key_and_ask_with_one(both: Both) -> None:
    for url, script in ((both.admin_url, "admin/events"), (both.server.url, "v1/chat/completions")):
        page = httpx.get(url)
        assert page.status_code == 200
        assert script in page.text
        assert "://" not in page.text, "no outside resource"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'sha256-" in policy
    assert httpx.get(both.admin_url + "admin/events").status_code == 401
    with both.admin.stream("GET", "/admin/events") as events:
        line = next(events.iter_lines()).removeprefix("data: ")
    assert json.loads(line)["running"] == 0


def test_top_shows_the_server(both: Both, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("sk-operator")
    (tmp_path / "key").chmod(0o600)
    ask = ["top", f"--url={both.admin.base_url}", "--interval=0.1", "--count=1"]
    assert run([*ask, f"--api-key-file={tmp_path / 'key'}"]) == 0
    assert "0 running, 0 waiting" in capfd.readouterr().out
    assert run(ask) == 2
    assert "answers 401; give a key with --api-key-file" in capfd.readouterr().err


def test_a_page_of_another_origin_is_refused(both: Both) -> None:
    answer = both.admin.post("/admin/pause", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert both.admin.get("/ready").status_code == 200


def test_a_deadline_ends_what_a_drain_leaves(both: Both, recall_steps: SlowSteps) -> None:
    """The last test of the server: it ends, though it was paused."""
    with recall_steps.within(), both.long_stream("r-2") as lines, both.admin.stream("GET", "/admin/events"):
        assert next(lines).startswith("data: {")
        both.admin.post("/admin/pause")
        wait_until(lambda: both.admin.get("/ready").status_code == 503)
        assert both.admin.post("/admin/drain", json={"deadline_seconds": 86401}).status_code == 400
        assert both.admin.post("/admin/drain", json={"deadline_seconds": 600}).json() == {"draining": 1}
        both.server.wait_until_draining()
        assert not both.admin.get("/admin/info").json()["status"]["paused"]
        assert both.admin.post("/admin/pause").status_code == 409
        assert both.admin.post("/admin/drain", json={"deadline_seconds": 0.1}).status_code == 200
        told = [line for line in lines if line]
    assert "the server was stopped" in told[-1]
    assert both.server.process.wait(TIMEOUT) == 0


def test_another_machine_needs_keys_and_a_port_is_taken_once(server: StartServer, check_models: Path) -> None:
    model = check_models / "recall-gqa"
    open_to_all = server(model, "--admin-port=0", "--admin-host=0.0.0.0")
    assert "there is no --admin-key-file" in open_to_all.last_line
    with held_port() as port:
        both = server(model, f"--port={port}", f"--admin-port={port}")
    assert "choose another with --admin-port" in both.last_line
    keys_alone = server(model, "--admin-key-file=keys")
    assert "--admin-key-file needs --admin-port" in keys_alone.last_line
