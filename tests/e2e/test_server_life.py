"""How a server ends: drained, stopped at once, or with a worker lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import plait_testing
import psutil
import pytest
from plait_testing.running_server import STOP_SECONDS, Server, StartServer, spawn_server
from plait_testing.slow_steps import SlowSteps

STOPPED = Path(plait_testing.__file__).parent / "stopped"
BUSY = {"messages": [{"role": "user", "content": "count 1 40"}], "stream": True, "max_tokens": 4000, "ignore_eos": True}


class Streaming(threading.Thread):
    """A long streamed answer in a thread of its own."""

    def __init__(self, server: Server, **fields: object) -> None:
        super().__init__()
        self._url, self._body = server.url + "/v1/chat/completions", BUSY | fields
        self.events: list[str] = []
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.started.set()

    def begun(self) -> Streaming:
        assert self.started.wait(60)
        return self


def orphans(pids: list[int]) -> list[int]:
    """Those of `pids` that do not end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(runs(pid) for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    """A process that was not reaped yet counts as ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_what_a_ready_server_says_works(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--served-model-name", "recall")
    said = "\n".join(running.lines)
    assert "recall (" in said
    assert "weights" in said
    assert "pages of 64" in said
    command = running.read_line("curl")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("data: {"), done.stderr
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_ctrl_c_drains_and_ends_with_0(slow_steps: SlowSteps, server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa")
    workers = [process.pid for process in running.workers()]
    with slow_steps.within():
        streaming = Streaming(running, max_tokens=600).begun()
        running.process.send_signal(signal.SIGINT)
        running.wait_until_draining()
    assert running.wait() == 0
    streaming.join()
    assert streaming.events[-1] == "[DONE]"
    assert json.loads(streaming.events[-2])["choices"][0]["finish_reason"] == "length"
    assert workers
    assert orphans(workers) == []
    assert any(line.startswith("Draining: 1 request") for line in running.lines)


def test_sigterm_drains_an_idle_server(server: StartServer, check_models: Path) -> None:
    assert server(check_models / "recall-gqa").stop(signal.SIGTERM) == 0


def test_a_server_whose_output_nobody_reads_any_more_still_drains(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa")
    assert running.process.stdout is not None
    running.process.stdout.close()
    running.wait_until_serving()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=STOP_SECONDS) == 0


def test_a_draining_server_takes_no_new_request(slow_steps: SlowSteps, server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa")
    slow_steps.begin()
    streaming = Streaming(running).begun()
    running.process.send_signal(signal.SIGTERM)
    running.wait_until_draining()
    refused = httpx.post(running.url + "/v1/chat/completions", json=BUSY, timeout=60)
    assert refused.status_code == 503
    assert httpx.get(running.url + "/health", timeout=60).status_code == 200
    assert running.stop(signal.SIGTERM) == 0
    streaming.join()


def test_a_leaving_server_takes_requests_until_it_drains(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--shutdown-delay-seconds", "3600")
    running.process.send_signal(signal.SIGTERM)
    assert "3600 s" in running.read_line("Leaving")
    refused = httpx.get(running.url + "/ready", timeout=60)
    assert refused.status_code == 503
    assert "about to drain" in refused.text
    assert httpx.get(running.url + "/health", timeout=60).status_code == 200
    body = {"prompt": "0123", "max_tokens": 4, "ignore_eos": True}
    assert httpx.post(running.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert running.stop(signal.SIGTERM) == 0


def test_a_leaving_server_drains_when_its_time_is_over(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--shutdown-delay-seconds", "0.1")
    assert running.stop(signal.SIGTERM) == 0
    assert [line.split(":")[0] for line in running.lines if line.startswith(("Leaving", "Draining"))] == [
        "Leaving",
        "Draining",
    ]


def test_a_second_ctrl_c_stops_at_once_and_tells_the_clients(
    slow_steps: SlowSteps, server: StartServer, check_models: Path
) -> None:
    running = server(check_models / "recall-gqa")
    slow_steps.begin()
    workers = [process.pid for process in running.workers()]
    streaming = Streaming(running).begun()
    running.process.send_signal(signal.SIGINT)
    running.wait_until_draining()
    assert running.stop(signal.SIGINT) == 0
    streaming.join()
    assert "error" in json.loads(streaming.events[-1])
    assert orphans(workers) == []
    assert " ERROR " not in running.errors


def test_a_killed_worker_ends_the_streams_with_an_error_and_the_server_with_5(
    slow_steps: SlowSteps, server: StartServer, check_models: Path
) -> None:
    running = server(check_models / "recall-gqa")
    slow_steps.begin()
    streaming = Streaming(running).begun()
    (worker,) = running.workers()
    worker.kill()
    assert running.wait() == 5
    streaming.join()
    error = json.loads(streaming.events[-1])["error"]
    assert "a worker was lost" in error["message"]
    assert "worker 0 was killed by SIGKILL" in running.last_line
    assert "exit code 5" in running.last_line


def test_a_stopped_worker_turns_health_red_until_it_goes_on(
    slow_steps: SlowSteps, server: StartServer, check_models: Path
) -> None:
    running = server(check_models / "recall-gqa")
    slow_steps.begin()
    streaming = Streaming(running, max_tokens=600)
    while len(streaming.events) < 20:
        assert streaming.is_alive()
        time.sleep(0.01)
    (worker,) = running.workers()
    worker.suspend()
    # A step has ten seconds; one unlike those measured would have a minute and more.
    wait_until_health(running, 503, seconds=40)
    assert "is overdue" in httpx.get(running.url + "/health", timeout=60).text
    worker.resume()
    slow_steps.end()
    wait_until_health(running, 200, seconds=60)
    assert running.stop(signal.SIGINT) == 0
    streaming.join()
    assert streaming.events[-1] == "[DONE]"


def wait_until_health(server: Server, status: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while httpx.get(server.url + "/health", timeout=60).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers_of(server: int) -> list[int]:
    """Workers of a process that may have ended."""
    words = ["--parent", str(server)]
    started = ((one.pid, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
    return [pid for pid, cmdline in started if words in map(list, pairwise(cmdline))]


def test_a_worker_that_stands_still_while_it_loads_ends_the_server_by_name(
    tmp_path: Path, check_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, (str(STOPPED), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    words = ("-m", "plait.cli", "serve", str(check_models / "recall-gqa"), "--port", "0")
    running = spawn_server(tmp_path / "log", *words, "--load-timeout-seconds", "1")
    try:
        assert running.wait() == 5
    finally:
        running.kill()
    assert "rank 0 has not loaded the model 1 s after the start" in running.last_line
    assert "raise --load-timeout-seconds" in running.last_line
    assert orphans(workers_of(running.process.pid)) == []


def test_a_worker_that_is_stopped_while_it_loads_is_given_up_in_seconds(
    server: StartServer, check_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, (str(STOPPED), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    refused = server(check_models / "recall-gqa", "--tp", "2", "--threads", "1")
    assert not refused.url
    assert refused.wait() == 5
    assert "worker 0 was stopped (SIGSTOP, or a debugger) for 2 s while it started" in refused.last_line
    assert orphans(workers_of(refused.process.pid)) == []


def test_a_killed_server_leaves_no_worker_behind(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa")
    workers = [process.pid for process in running.workers()]
    running.kill()
    assert workers
    assert orphans(workers) == []
