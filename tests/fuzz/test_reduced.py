"""Every decoder of the Python packages, with its corpus and some broken inputs; `make fuzz` goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import run
from fuzz.mutate import make_input
from fuzz.targets import CORPUS, ROOT, TARGETS, Target, named

SEED = 1


def few(number: int) -> bool:
    return number < 20


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "FAILURES", tmp_path)
    return tmp_path


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_decoder_takes_or_refuses_whatever_comes(target: Target) -> None:
    found = run.run_python(target, SEED, lambda number: number < target.num_reduced)
    assert found["failures"] == []


def test_an_error_of_another_kind_is_a_failure_whose_input_is_kept(failures: Path) -> None:
    def stumble(raw: bytes) -> None:
        raise KeyError(len(raw)) if len(raw) % 2 else ValueError("refused")

    found = run.run_python(Target("restarts", [b"[["], (ValueError,), stumble), SEED, few)
    assert found["failures"]
    number, why = found["failures"][0]
    assert "KeyError" in why
    corpus = named("restarts").corpus()
    assert (failures / f"restarts-{SEED}-{number}").read_bytes() == make_input(
        "restarts", SEED, number, corpus, [b"[["]
    )


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_CPU_SECONDS", 0.05)

    def hang(_: bytes) -> None:
        while True:
            pass

    found = run.run_python(Target("restarts", [b"[["], (), hang), SEED, lambda _: False)
    assert [why.split(":")[0] for _, why in found["failures"]] == ["HungError"] * found["inputs"]


def test_a_hang_in_c_code_ends_the_process_and_leaves_the_inputs_number(failures: Path) -> None:
    code = f"""
import itertools
from pathlib import Path
from fuzz import run
from fuzz.targets import Target
run.MAX_CPU_SECONDS, run.FAILURES = 0.05, Path({str(failures)!r})
hang = lambda raw: sum(itertools.repeat(0)) if seen.append(raw) or len(seen) > 1 else None
seen = []
run.run_python(Target("restarts", [b"[["], (), hang), {SEED}, lambda _: True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", check=False)
    assert done.returncode == -signal.SIGPROF
    assert (failures / "restarts.at").read_bytes() == (1).to_bytes(8, "little")


def test_every_folder_of_the_corpus_is_read_by_a_decoder() -> None:
    """Those of the crates are named in `router/fuzz`."""
    crates = "".join(path.read_text() for path in (ROOT / "router/fuzz/src").rglob("*.rs"))
    names = {target.name for target in TARGETS}
    assert [name for name in sorted(os.listdir(CORPUS)) if name not in names and f'"{name}"' not in crates] == []
