"""Prefetched tensors cause no page faults and equal the file's."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
import torch
from plait_testing.tiny_models import save_tiny_llama
from plait_worker.weights import prefetch
from plait_worker.weights.prefetch import populate
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from safetensors.torch import load_file

NUM_BYTES = 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> SafetensorsFolder:
    save_tiny_llama(tmp_path)
    return SafetensorsFolder(tmp_path)


def test_prefetched_tensors_are_read_without_a_page_fault(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(NUM_BYTES))
    faults = []
    for is_ahead in (False, True):
        mapped = torch.from_file(str(tmp_path / "numbers"), shared=True, size=NUM_BYTES, dtype=torch.uint8)
        if is_ahead and not populate(mapped[5:]):
            pytest.skip("this system maps pages only as they are touched")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert not mapped.any()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[0] > 500
    assert faults[1] < 100


def test_the_ranks_of_a_machine_prefetch_each_piece_once(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(NUM_BYTES))
    faults = 0
    for rank in range(2):
        mapped = torch.from_file(str(tmp_path / "numbers"), shared=True, size=NUM_BYTES, dtype=torch.uint8)
        if not populate(mapped, rank, 2):
            pytest.skip("this system maps pages only as they are touched")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        halves = mapped.view(-1, 2, 16 << 20)
        assert not halves[:, rank].any()
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert not halves[:, 1 - rank].any()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 250, "the other rank's pieces"
    assert faults < 100


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
