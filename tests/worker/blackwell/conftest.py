"""flashinfer on CPU tensors, with the stand-in where its Blackwell kernels would be."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def launcher(flashinfer_there: None, monkeypatch: pytest.MonkeyPatch) -> object:
    from plait_testing.trtllm_gen import Launcher, replace_launcher

    made = Launcher()
    replace_launcher(made, monkeypatch.setattr)
    monkeypatch.setattr("plait_worker.attention.selection.compute_capability", lambda device: (10, 0))
    return made
