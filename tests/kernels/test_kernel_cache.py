"""Compiled CUDA kernels are kept on disk: a later start compiles nothing, and loads only what its user has written."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from plait_kernels import kernel_cache, nvrtc
from plait_kernels.kernel_cache import KernelCache

CODE = b"machine code"
needs_nvrtc = pytest.mark.skipif(
    nvrtc.no_compiler_reason() is not None, reason="no NVRTC; pip install cuda-bindings nvidia-cuda-nvrtc"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "plait"


def opened(folder: Path) -> KernelCache:
    cache = KernelCache()
    cache.keep_in(folder)
    return cache


def test_code_is_kept_for_the_next_start_in_a_folder_of_the_users_own(folder: Path) -> None:
    cache = opened(folder)
    assert not folder.exists(), "a rank that compiles nothing makes no folder"
    assert cache.get("a") is None
    cache.put("a", CODE)
    assert opened(folder).get("a") == CODE
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("kept", [b"", b"short", CODE * 9])
def test_a_broken_file_is_none_and_is_written_anew(folder: Path, kept: bytes) -> None:
    cache = opened(folder)
    cache.put("a", CODE)
    (folder / "a.cubin").write_bytes(kept)
    assert cache.get("a") is None
    cache.put("a", CODE)
    assert cache.get("a") == CODE


def test_a_folder_that_can_only_be_read_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(folder).put("a", CODE)

    def refuse(*_given: object, **_more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert opened(folder).get("a") == CODE


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_is_not_used(folder: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    opened(folder).put("a", CODE)
    folder.chmod(mode)
    caplog.set_level(logging.DEBUG)
    cache = opened(folder)
    cache.put("b", CODE)
    assert cache.get("a") is None
    assert [file.name for file in folder.iterdir()] == ["a.cubin"]
    assert "others may write there" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_not_used(folder: Path) -> None:
    opened(folder).put("a", CODE)
    os.chown(folder, os.geteuid() + 1, -1)
    assert opened(folder).get("a") is None


def test_a_folder_that_cannot_be_made_costs_a_line_of_debugging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    caplog.set_level(logging.DEBUG)
    cache = opened(tmp_path / "file" / "plait")
    for key in ("a", "b"):
        cache.put(key, CODE)
        assert cache.get(key) is None
    assert [(record.levelno, "Not a directory" in record.message) for record in caplog.records] == [
        (logging.DEBUG, True)
    ]


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    cache = opened(folder)
    cache.put("a", CODE)
    (folder / "a.cubin").rename(tmp_path / "elsewhere")
    (folder / "a.cubin").symlink_to(tmp_path / "elsewhere")
    assert cache.get("a") is None


def test_a_folder_or_a_pipe_in_place_of_a_file_is_none(folder: Path) -> None:
    cache = opened(folder)
    cache.put("a", CODE)
    (folder / "b.cubin").mkdir()
    os.mkfifo(folder / "c.cubin")
    writer = os.open(folder / "c.cubin", os.O_RDWR)
    num_open = len(os.listdir("/proc/self/fd"))
    assert [cache.get(key) for key in "abc"] == [CODE, None, None]
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(writer)


def test_files_that_were_used_last_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_FILES", 3)
    cache = opened(folder)
    for age, name in enumerate(("c", "b", "a"), 1):
        cache.put(name, CODE)
        os.utime(folder / f"{name}.cubin", (1_000_000 - age, 1_000_000 - age))
    assert cache.get("a") == CODE, "which makes it the newest"
    (folder / "thesis").touch()
    os.utime(folder / "thesis", (0, 0))
    cache.put("d", CODE)
    assert {file.name for file in folder.iterdir()} == {"a.cubin", "c.cubin", "d.cubin", "thesis"}


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Grows with each compilation; what is compiled is kept."""
    names, compile_source = list[str](), nvrtc.compile_source

    def count(source: bytes, name: str, *given: Sequence[object]) -> bytes:
        names.append(name)
        code: bytes = compile_source(source, name, *given)  # type: ignore[arg-type]
        return code

    monkeypatch.setattr(nvrtc, "compile_source", count)
    nvrtc.CACHE.keep_in(folder)
    yield names
    nvrtc.CACHE.keep_in(None)


@needs_nvrtc
def test_a_kernel_is_compiled_once_for_each_source_header_define_and_gpu(
    folder: Path, tmp_path: Path, compiled: list[str]
) -> None:
    header = tmp_path / "one.cuh"
    header.write_text("#define ONE 1\n")
    source = b'#include "one.cuh"\nextern "C" __global__ void set(int *x) { *x = ONE + TWO; }'

    def make(two: int = 2, capability: tuple[int, int] = (9, 0), source: bytes = source) -> bytes:
        nvrtc.CACHE.keep_in(folder)  # as another start does
        return nvrtc.machine_code(source, "set.cu", (f"TWO={two}",), capability, [header])

    first = make()
    assert first.startswith(b"\x7fELF")
    assert make() == first
    assert len(compiled) == 1
    others: list[Callable[[], bytes]] = [
        lambda: make(two=3),
        lambda: make(capability=(8, 0)),
        lambda: make(source=source + b"\n// other"),
    ]
    assert len({first, *(other() for other in others)}) > 2
    assert len(compiled) == 4
    header.write_text("#define ONE 7\n")
    assert make() != first
    assert len(compiled) == 5
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    make()
    assert len(compiled) == 6, "a broken file is compiled anew"
    make()
    assert len(compiled) == 6
