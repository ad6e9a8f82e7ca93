"""The CPU's backend of either kind of attention."""

from __future__ import annotations

import logging

from plait_worker.attention.mha.cpu_mha import CpuMha
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.mla.cpu_mla import CpuMla
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.spec import MhaShape, MlaShape

_log = logging.getLogger(__name__)


def cpu_attention(
    shape: MhaShape | MlaShape, page_size: int, mla_context_chunk_size: int
) -> CpuMha | TorchMha | CpuMla | TorchMla:
    """What the model's shape asks for, compiled where the kernels take it; the log says which.

    ``page_size`` and ``mla_context_chunk_size`` (of latent attention) in tokens.
    """
    chosen = (
        _latent(shape, page_size, mla_context_chunk_size) if isinstance(shape, MlaShape) else _paged(shape, page_size)
    )
    _log.info("attention: %s", type(chosen).__name__)
    return chosen


def _paged(shape: MhaShape, page_size: int) -> CpuMha | TorchMha:
    return CpuMha(shape, page_size) if CpuMha.takes(shape) else TorchMha(shape, page_size)


def _latent(shape: MlaShape, page_size: int, mla_context_chunk_size: int) -> CpuMla | TorchMla:
    backend = CpuMla if CpuMla.takes(shape) else TorchMla
    return backend(shape, page_size, mla_context_chunk_size)
