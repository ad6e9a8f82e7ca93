"""The pages of prefetched tensors are mapped, and their values are the file's."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from plait_testing.tiny_models import save_tiny_llama
from plait_worker.weights import prefetch
from plait_worker.weights.prefetch import populate
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from safetensors.torch import load_file
from torch import Tensor

PAGEMAP = Path("/proc/self/pagemap")
NUM_BYTES = 64 << 20
PIECE_BYTES = 16 << 20
LARGEST_PAGE_BYTES = 2 << 20
"""The kernel may map a large page that reaches over the end of a piece."""


@pytest.fixture
def folder(tmp_path: Path) -> SafetensorsFolder:
    save_tiny_llama(tmp_path)
    return SafetensorsFolder(tmp_path)


def map_numbers(folder: Path) -> Tensor:
    """A file of zeros, mapped."""
    (folder / "numbers").write_bytes(bytes(NUM_BYTES))
    return torch.from_file(str(folder / "numbers"), shared=True, size=NUM_BYTES, dtype=torch.uint8)


def num_mapped_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor whose pages this process has mapped, so that reading them causes no fault.

    A count of faults says less: one fault maps up to 2 MiB, as the page cache happens to hold the file.
    """
    if not PAGEMAP.exists():
        pytest.skip("this system does not say which pages are mapped")
    first, end = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    with PAGEMAP.open("rb") as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((end - first) * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_every_page_of_a_prefetched_tensor_is_mapped(tmp_path: Path) -> None:
    mapped = map_numbers(tmp_path)
    assert num_mapped_bytes(mapped) == 0
    if not populate(mapped[5:]):
        pytest.skip("this system maps pages only as they are touched")
    assert num_mapped_bytes(mapped) == NUM_BYTES


@pytest.mark.parametrize("rank", [0, 1])
def test_the_ranks_of_a_machine_prefetch_each_piece_once(tmp_path: Path, rank: int) -> None:
    mapped = map_numbers(tmp_path)
    if not populate(mapped, rank, 2):
        pytest.skip("this system maps pages only as they are touched")
    pieces = mapped.split(PIECE_BYTES)
    assert len(pieces) == 4
    for number, piece in enumerate(pieces):
        if number % 2 == rank:
            assert num_mapped_bytes(piece) == PIECE_BYTES
        else:
            assert num_mapped_bytes(piece) <= 2 * LARGEST_PAGE_BYTES, "the other rank's piece"


def test_tensors_are_the_same_while_they_are_prefetched(folder: SafetensorsFolder, tmp_path: Path) -> None:
    right = load_file(tmp_path / "model.safetensors")
    with prefetch.prefetch(folder, folder.names):
        for name, tensor in right.items():
            assert torch.equal(folder.read(name), tensor)


@pytest.mark.parametrize("free_bytes", [3 << 20, 1 << 10])
def test_nothing_is_prefetched_if_it_would_fill_the_memory(
    folder: SafetensorsFolder, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_asked = threading.Event()
    monkeypatch.setattr(prefetch, "free_memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(prefetch, "_populate_tensor", lambda *_asked: was_asked.set())
    fits = folder.num_bytes() <= free_bytes // 2
    with prefetch.prefetch(folder, folder.names):
        assert was_asked.wait(30 if fits else 0) == fits
    assert was_asked.is_set() == fits
    assert fits == (free_bytes > 1 << 20)


def test_layers_are_prefetched_in_the_order_of_the_model() -> None:
    names = ["model.layers.10.x", "model.layers.9.x", "model.embed", "model.layers.2.y", "model.layers.2.x"]
    assert sorted(names, key=prefetch._in_order) == [
        "model.embed",
        "model.layers.2.x",
        "model.layers.2.y",
        "model.layers.9.x",
        "model.layers.10.x",
    ]
