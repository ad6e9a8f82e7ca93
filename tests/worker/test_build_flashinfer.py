"""`plait kernels build` compiles what a start would: flashinfer and ninja are real, the compilers stand-ins."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plait_proto import ExitCode
from plait_worker import build_flashinfer, kernels_command
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.registry import HOPPER, modules_for
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MhaShape
from plait_worker.build_flashinfer import num_parallel_builds

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 128,
}
(CAPABILITY,) = HOPPER
SHAPE = MhaShape(8, 2, 128, 128**-0.5, torch.bfloat16)
GIB = 1 << 30
# Writes the file that it is told to, and what that was made of. `breaks` names the source that it refuses, `says` how.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; }
here=$(dirname "$0"); out=; rules=; source=
while [ $# -gt 0 ]; do
  case "$1" in -o) out=$2 ;; -MF) rules=$2 ;; -c) source=$2 ;; esac
  shift
done
if [ -f "$here/breaks" ]; then
  case "$source" in *"$(cat "$here/breaks")"*) cat "$here/says"; exit 1 ;; esac
fi
[ -n "$rules" ] && echo "$out: $source" > "$rules"
[ -n "$out" ] && : > "$out"
exit 0
"""


class Toolkit:
    """A folder as CUDA's toolkit has it."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("nvcc", "c++"):
            (self.bin / name).write_text(COMPILER)
            (self.bin / name).chmod(0o755)

    def refuse(self, source: str, words: str) -> None:
        """What it says of each source whose path holds this."""
        (self.bin / "breaks").write_text(source)
        (self.bin / "says").write_text(words + "\n")

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(self.bin.parent))
        monkeypatch.setenv("CXX", str(self.bin / "c++"))
        forget_toolkit()


def forget_toolkit() -> None:
    """Have flashinfer look for one again."""
    from flashinfer.jit.cpp_ext import get_cuda_path, get_cuda_version

    get_cuda_path.cache_clear()
    get_cuda_version.cache_clear()


@pytest.fixture
def toolkit(for_hopper: None, ninja_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toolkit]:
    """In use, with an empty cache of flashinfer's; of the modules one came with it, which has most files."""
    from flashinfer.jit import env

    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", tmp_path / "aot")
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "jit")
    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path / "sources")
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], sysconfig.get_path("scripts")]))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    fmha = modules_for([SHAPE], 64, CAPABILITY)[0]
    (tmp_path / "aot" / fmha.name).mkdir(parents=True)
    (tmp_path / "aot" / fmha.name / f"{fmha.name}.so").touch()
    made = Toolkit(tmp_path / "cuda")
    made.use(monkeypatch)
    yield made
    forget_toolkit()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A configuration is all that is asked for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def build(monkeypatch: pytest.MonkeyPatch, model: Path) -> int:
    settings = ["--dtype", "auto", "--kv-cache-dtype", "auto", "--page-size", "64", "--tp", "1", "--arch", "9.0"]
    monkeypatch.setattr(sys, "argv", ["plait kernels", "build", "--model", str(model), *settings])
    return kernels_command.main()


def states() -> list[str]:
    """Of FMHAv2, XQA, fa3 and fa2."""
    return [module.state for module in modules_for([SHAPE], 64, CAPABILITY)]


def test_what_is_missing_is_compiled_with_progress_and_once(
    toolkit: Toolkit, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_flashinfer, "_SECONDS_BETWEEN_REPORTS", 0.001)
    assert states() == ["prebuilt", "missing", "missing", "missing"]
    assert build(monkeypatch, model) == 0
    assert states() == ["prebuilt", "built", "built", "built"]
    said = capsys.readouterr().out
    assert "3 modules to compile" in said
    for number in (1, 2, 3):
        assert f"[{number}/3] compiling" in said
        assert f"[{number}/3] done in" in said
    assert "files compiled: [1/3] " in said
    assert [module.num_files() for module in modules_for([SHAPE], 64, CAPABILITY)[1:]] == [(5, 5), (10, 10), (10, 10)]
    assert build(monkeypatch, model) == 0
    assert "compiling" not in capsys.readouterr().out


def test_beside_a_module_that_does_not_compile_the_others_do(
    toolkit: Toolkit, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toolkit.refuse("xqa/mha.cu", "mha.cu(7): error: expected a type")
    assert build(monkeypatch, model) == ExitCode.SETTINGS
    assert states() == ["prebuilt", "missing", "built", "built"]
    said = capsys.readouterr()
    reason = r"mha\.cu\(7\): error: expected a type; FLASHINFER_JIT_VERBOSE=1 shows all"
    assert re.search(rf"\[1/3\] failed after \d+ s: {reason}", said.out)
    assert "settings error (exit code 2): 1 of 4 modules could not be compiled" in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "release", "said"),
    [
        (
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            "13.0",
            "memory ran out: free some, or set MAX_JOBS",
        ),
        (
            "nvcc fatal   : Unknown option '--compress-mode=size'",
            "13.1",
            "is of CUDA 13.0: install NVIDIA's CUDA toolkit 13.1",
        ),
    ],
)
def test_a_failure_says_what_to_do(
    words: str,
    release: str,
    said: str,
    toolkit: Toolkit,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", release)
    toolkit.refuse("xqa/mha.cu", words)
    build(monkeypatch, model)
    told = capsys.readouterr().out
    assert words in told
    assert said in told


def test_a_full_disk_is_named(
    toolkit: Toolkit, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(100, 100, 0))
    toolkit.refuse("xqa/mha.cu", "Fatal error: can't write 34 bytes")
    build(monkeypatch, model)
    assert "is full: free some space, or set FLASHINFER_WORKSPACE_BASE to another folder" in capsys.readouterr().out


def test_what_another_toolkit_built_is_compiled_anew_before_a_start_has_to(
    toolkit: Toolkit, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, model)
    Toolkit(tmp_path / "cuda-13.1").use(monkeypatch)
    assert states() == ["prebuilt", "outdated", "outdated", "outdated"]
    monkeypatch.setattr("plait_worker.attention.selection.compute_capability", lambda _device: CAPABILITY)
    outcome = try_backend("trtllm_mha", BackendRequirements(SHAPE, 64, 64, 64, torch.device("cpu")))
    assert outcome == "1 of its modules are not built; run `plait kernels build`, which takes minutes"
    assert build(monkeypatch, model) == 0
    assert states() == ["prebuilt", "built", "built", "built"]


def test_a_module_whose_sources_changed_is_not_called_built(
    toolkit: Toolkit, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, model)
    (fa3,) = [module for module in modules_for([SHAPE], 64, CAPABILITY) if module.name.endswith("sm90")]
    source = next((tmp_path / "sources" / fa3.name).glob("*.cu"))
    source.write_text(source.read_text() + "\n")
    assert fa3.state == "outdated"


def test_without_a_host_compiler_one_is_asked_for(
    toolkit: Toolkit, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert build(monkeypatch, model) == ExitCode.SETTINGS
    assert "not found; install that program (g++ brings c++ and gcc)" in capsys.readouterr().out


def test_where_compiling_is_forbidden_it_says_by_what(
    toolkit: Toolkit, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert build(monkeypatch, model) == ExitCode.SETTINGS
    assert "; unset FLASHINFER_DISABLE_JIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PATH", "/nowhere", "there is no ninja: pip install ninja"),
        ("CUDA_HOME", "/nowhere", "there is no nvcc in /nowhere/bin: install "),
    ],
)
def test_a_program_that_is_missing_is_named_before_anything_is_compiled(
    variable: str,
    value: str,
    said: str,
    toolkit: Toolkit,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    forget_toolkit()
    assert build(monkeypatch, model) == ExitCode.SETTINGS
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"3 modules are to be compiled, but {said}" in last
    assert "put each NAME.so of its cache at" in last


@pytest.mark.parametrize(
    ("num_modules", "num_cores", "free_bytes", "at_once"),
    [(4, 64, 512 * GIB, 2), (4, 64, 2048 * GIB, 4), (1, 16, 512 * GIB, 1), (4, 16, 32 * GIB, 1), (4, 2, 1 * GIB, 1)],
)
def test_memory_bounds_how_many_modules_are_compiled_at_once(
    num_modules: int, num_cores: int, free_bytes: int, at_once: int
) -> None:
    assert num_parallel_builds(num_modules, num_cores, free_bytes) == at_once
