"""lm-eval with nothing on disk but a task of ours: the tokenizer is the server's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plait_testing.client_checks import MODEL, Checks, equal, report

WORDS = ("kilo", "lima", "zulu")
QUESTIONS = [{"word": word, "choices": list(WORDS), "answer": at} for at, word in enumerate(WORDS)]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{asked}"
"""
TEMPLATED = "<|bos|><|user|>copy {{word}}<|assistant|>"
"""lm-eval 0.4.13 applies no chat template with a remote tokenizer, of any server: it gives it a list of messages."""
ASKED = {"copied": "copy {{word}}", "copied_templated": TEMPLATED, "chosen": TEMPLATED, "rolled": "copy {{word}}"}
GENERATED = """
output_type: generate_until
doc_to_target: "{{word}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
TASKS = {
    "copied": "task: copied" + GENERATED,
    "copied_templated": "task: copied_templated" + GENERATED,
    "chosen": """
task: chosen
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "rolled": """
task: rolled
output_type: loglikelihood_rolling
doc_to_target: "{{word}}"
metric_list:
  - metric: bits_per_byte
""",
}


def write_tasks(folder: Path) -> None:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.lstrip("\n") + COMMON.format(data=data, asked=ASKED[name]))


def evaluated(folder: Path, task: str, model: str, path: str, *words: str, **args: object) -> dict[str, Any]:
    """What `lm-eval` of the command line found for a task."""
    given = {"model": MODEL, "base_url": sys.argv[1] + path, "num_concurrent": 2, **args}
    program = Path(sys.executable).with_name("lm_eval")
    out = folder / "out" / task / model
    command: list[str | Path] = [
        program,
        "run",
        "--model",
        model,
        "--tasks",
        task,
        "--include_path",
        folder,
        "--output_path",
        out,
    ]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items()), *words]
    quiet = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | quiet)
    equal(done.returncode == 0 or done.stderr[-2000:], True)
    (file,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"][task]
    return found


def copied_by_chat(folder: Path) -> None:
    words = ("--apply_chat_template",)
    found = evaluated(folder, "copied", "local-chat-completions", "/v1/chat/completions", *words)
    equal(found["exact_match,none"], 1.0)


def copied_by_completions(folder: Path) -> None:
    args = {"tokenizer_backend": "remote"}
    found = evaluated(folder, "copied_templated", "local-completions", "/v1/completions", **args)
    equal(found["exact_match,none"], 1.0)


def chosen(folder: Path) -> None:
    args = {"tokenizer_backend": "remote"}
    found = evaluated(folder, "chosen", "local-completions", "/v1/completions", **args)
    equal(found["acc,none"], 1.0)


def rolled(folder: Path) -> None:
    found = evaluated(folder, "rolled", "local-completions", "/v1/completions")
    equal(found["bits_per_byte,none"] > 0, True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        checks: Checks = {
            "local-chat-completions, generation": lambda: copied_by_chat(folder),
            "local-completions, generation, remote tokenizer": lambda: copied_by_completions(folder),
            "local-completions, multiple choice, remote tokenizer": lambda: chosen(folder),
            "local-completions, rolling log-likelihood, tokenizer found by itself": lambda: rolled(folder),
        }
        report(["lm_eval"], checks)


if __name__ == "__main__":
    main()
