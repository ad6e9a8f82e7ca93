"""`plait run-batch` on a real engine: the answers of the API, and a kill that loses nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from plait_testing.held_steps import HeldSteps

END_SECONDS = 120.0


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    same = {"model": "recall-gqa", "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": same | body})


LINES = [
    request("one", prompt="Hello", max_tokens=1),
    "no JSON",
    request("other model", prompt="Hello", model="gpt-4o"),
    request("held", prompt="Hello", max_tokens=3),
    request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3),
    request("response", "/v1/responses", input="hi", max_output_tokens=3),
    request("streamed", prompt="Hello", stream=True),
]


def start(model: Path, folder: Path) -> subprocess.Popen[str]:
    words = ["-m", "plait.cli", "run-batch", str(folder / "in"), str(folder / "out"), str(model), "--threads", "1"]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, num_lines: int) -> None:
    deadline = time.monotonic() + END_SECONDS
    while path.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_batch_that_was_killed_goes_on_where_it_was(tmp_path: Path, check_models: Path) -> None:
    (tmp_path / "in").write_text("\n".join(LINES))
    steps = HeldSteps(tmp_path)
    steps.begin(num_decode=1)
    with steps.of_servers(), start(check_models / "recall-gqa", tmp_path) as killed:
        steps.wait_until_held(1)
        # What decodes is held. What is refused or broken has its result, and "one" may have.
        wait_for_lines(tmp_path / "out", 3)
        workers = psutil.Process(killed.pid).children(recursive=True)
        killed.kill()
    _, left = psutil.wait_procs(workers, timeout=END_SECONDS)
    assert left == []
    before = (tmp_path / "out").read_bytes()
    with (tmp_path / "out").open("ab") as torn:
        torn.write(b'{"id":"batch_req_12')
    with start(check_models / "recall-gqa", tmp_path) as resumed:
        said, errors = resumed.communicate(timeout=END_SECONDS)
    assert resumed.returncode == 0, errors
    num_lines = before.count(b"\n")
    assert said.splitlines()[0] == f"{num_lines} of 7 lines have their results; going on with the others"
    after = (tmp_path / "out").read_bytes()
    assert after.startswith(before)
    results = {line["custom_id"]: line for line in map(json.loads, after.splitlines())}
    assert len(after.splitlines()) == len(results) == len(LINES)
    assert results[None]["error"]["line"] == 2
    statuses = {name: line["response"]["status_code"] for name, line in results.items() if name is not None}
    assert statuses == {"one": 200, "other model": 404, "held": 200, "chat": 200, "response": 200, "streamed": 400}
    assert results["held"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert results["response"]["response"]["body"]["object"] == "response"
