"""guidellm, with synthetic prompts that the served model's own tokenizer makes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from plait_testing.client_checks import MODEL, Checks, equal, report

NUM_REQUESTS = 6


def benchmark(route: str) -> None:
    """All requests end well, with as many tokens as were asked for."""
    url, tokenizer = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder:
        backend = f"kind=openai_http,target={url},model={MODEL},request_format={route}"
        words = ["--backend", backend, "--profile", "kind=concurrent,streams=2"]
        words += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
        words += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=12"]
        words += ["--output", f"kind=json,path={folder}/out.json", "--disable-console"]
        program = Path(sys.executable).with_name("guidellm")
        done = subprocess.run([program, "run", *words], capture_output=True, text=True, check=False, cwd=folder)
        equal(done.returncode == 0 or (done.stdout + done.stderr)[-2000:], True)
        (run,) = json.loads(Path(folder, "out.json").read_text())["benchmarks"]
    counts = run["metrics"]["request_totals"]
    equal((counts["successful"], counts["errored"]), (NUM_REQUESTS, 0))
    equal(run["metrics"]["output_token_count"]["successful"]["mean"], 12.0)


CHECKS: Checks = {
    "chats": lambda: benchmark("/v1/chat/completions"),
    "completions": lambda: benchmark("/v1/completions"),
}

if __name__ == "__main__":
    report(["guidellm"], CHECKS)
