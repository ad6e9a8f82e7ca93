"""Without a compiler, or with one that cannot make a build, the installation warns and goes on."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from plait_kernels.cpu import library

ROOM = Path(__file__).parents[2] / "kernels"
LEVELS = ["avx512bf16", "avx2", "portable"] if platform.machine() == "x86_64" else ["portable"]
FAKE_COMPILER = """#!/bin/sh
case "$*" in *REFUSED*) echo "no such instructions" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A copy of the package without its sources, which no compiler here reads, but with an earlier build's library."""
    shutil.copy(ROOM / "compile_native.py", tmp_path)
    folder = tmp_path / "plait_kernels" / "cpu"
    folder.mkdir(parents=True)
    (folder / f"libplait_{LEVELS[0]}.so").write_text("old")
    return tmp_path


def compile_in(room: Path, refused: str | None) -> subprocess.CompletedProcess[str]:
    """Compile with a compiler that rejects an option; without one if that is None."""
    compiler = room / "c++"
    if refused is not None:
        compiler.write_text(FAKE_COMPILER.replace("REFUSED", refused))
        compiler.chmod(stat.S_IRWXU)
    environment = {**os.environ, "CXX": str(compiler)}
    command = [sys.executable, str(room / "compile_native.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


def built_in(room: Path) -> set[str]:
    return {path.name for path in (room / "plait_kernels" / "cpu").iterdir()}


@pytest.mark.parametrize("refused", [None, "-std=c++20"], ids=["no compiler", "an old compiler"])
def test_without_a_cpp20_compiler_nothing_is_built_and_torch_computes(room: Path, refused: str | None) -> None:
    done = compile_in(room, refused)
    assert (done.returncode, done.stdout, built_in(room)) == (0, "", set())
    assert "are NOT compiled: torch computes GEMMs, attention and experts on a CPU, slower" in done.stderr
    assert "sudo apt install build-essential" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(len(LEVELS) == 1, reason="this kind of processor has one build")
def test_without_one_instruction_set_the_others_are_built(room: Path) -> None:
    done = compile_in(room, "-mavx512bf16")
    assert done.returncode == 0
    assert done.stdout.split() == ["plait_kernels/cpu/libplait_avx2.so", "plait_kernels/cpu/libplait_portable.so"]
    assert built_in(room) == {"libplait_avx2.so", "libplait_portable.so"}
    assert "CPU kernels for avx512bf16 are NOT compiled: a simpler build serves" in done.stderr


def test_with_all_of_them_there_is_no_warning(room: Path) -> None:
    done = compile_in(room, "-mno-such-option")
    assert (done.returncode, done.stderr) == (0, "")
    assert built_in(room) == {f"libplait_{level}.so" for level in LEVELS}


def test_what_is_newer_than_its_sources_is_kept(room: Path) -> None:
    (room / "csrc").mkdir()
    source = room / "csrc" / "library.cpp"
    source.touch()
    compiler = room / "c++"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(stat.S_IRWXU)
    built = [room / "plait_kernels" / "cpu" / f"libplait_{level}.so" for level in LEVELS]
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {
        "PATH": f"{room}{os.pathsep}{os.environ['PATH']}"
    }
    for age, is_kept in ((100, True), (-100, False)):
        for path in built:
            path.write_text("old")
        at = built[-1].stat().st_mtime - age
        for path in (source, room / "compile_native.py"):
            os.utime(path, (at, at))
        subprocess.run([sys.executable, str(room / "compile_native.py")], env=environment, check=True, timeout=180)
        assert {path.read_text().strip() for path in built} == {"old" if is_kept else "made"}


@pytest.mark.parametrize(
    ("there", "chosen", "said"),
    [
        (["portable", "avx2", "avx512bf16"], "avx512bf16", None),
        (["portable", "avx2"], "avx2", "not compiled for avx512bf16: the build for avx2 is slower"),
        ([], None, "no CPU kernels are compiled: torch computes GEMMs, attention and experts, slower"),
    ],
)
def test_start_up_takes_the_best_build_and_logs_what_is_slower(
    there: list[str], chosen: str | None, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for level in there:
        (tmp_path / f"libplait_{level}.so").touch()
    with caplog.at_level(logging.WARNING):
        assert library.choose_build(tmp_path, "avx512bf16") == chosen
    if said is None:
        assert not caplog.messages
    else:
        [line] = caplog.messages
        assert said in line
        assert "sudo apt install build-essential" in line
