"""Writing a step's keys and values into the pages of the cache."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.kv_cache import reference
from plait_kernels.solutions import triton_solution


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, place_T: Tensor) -> None:
    """Token t's keys and values of every head go to token ``place_T[t] % P`` of page ``place_T[t] // P``.

    ``pages`` is ``[N, 2, G, P, D]``, contiguous; ``place_T`` int64.
    """
    solution = triton_solution(__name__) if pages.is_cuda else reference
    solution.store(k_TGD, v_TGD, pages, place_T)


__all__ = ["store"]
