"""aiperf, which replays a trace in Mooncake's form: chats at the trace's times, with prefixes that they share."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plait_testing.client_checks import MODEL, Checks, equal, report

NUM_REQUESTS = 8
BLOCK = 64
OUTPUT_LEN = 12


def trace() -> list[dict[str, Any]]:
    """Requests of up to 6 blocks, the first two of which all share, 250 ms apart."""
    own = [[0, 1, *range(2 + 10 * number, 2 + 10 * number + number % 4 + 1)] for number in range(NUM_REQUESTS)]
    return [
        {"timestamp": 250 * at, "input_length": BLOCK * len(ids), "output_length": OUTPUT_LEN, "hash_ids": ids}
        for at, ids in enumerate(own)
    ]


def replay(*words: str) -> None:
    """All requests end well, with as many tokens as the trace says."""
    url, tokenizer = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.jsonl")
        file.write_text("".join(json.dumps(request) + "\n" for request in trace()))
        command: list[str | Path] = [Path(sys.executable).with_name("aiperf"), "profile", "--model", MODEL]
        command += ["--url", url, "--tokenizer", tokenizer, "--input-file", file, "--isl-block-size", str(BLOCK)]
        command += ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule", "--streaming", "--ui", "none"]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", folder, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        equal(done.returncode == 0 or (done.stdout + done.stderr)[-2000:], True)
        (told,) = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(told.read_text())
    equal(found["request_count"]["avg"], NUM_REQUESTS)
    equal(found.get("error_request_count", {"avg": 0})["avg"], 0)
    equal(found["output_sequence_length"]["avg"], OUTPUT_LEN)


CHECKS: Checks = {
    "a trace as chats": lambda: replay("--endpoint-type", "chat"),
    "a trace as completions": lambda: replay("--endpoint-type", "completions"),
}

if __name__ == "__main__":
    report(["aiperf"], CHECKS)
