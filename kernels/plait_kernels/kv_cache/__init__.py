"""Writing a step's keys and values into the pages of the cache."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.kv_cache import reference
from plait_kernels.kv_cache.reference import FP8, UNSCALED, PageScales, as_bytes, stored
from plait_kernels.solutions import triton_solution


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, place_T: Tensor, scales: PageScales = UNSCALED) -> None:
    """Token t's keys and values of every head go to token ``place_T[t] % P`` of page ``place_T[t] // P``.

    ``pages`` is ``[N, 2, G, P, D]``, contiguous, in the dtype of the keys or float8_e4m3fn; ``place_T`` int64.
    """
    solution = triton_solution(__name__) if pages.is_cuda else reference
    solution.store(k_TGD, v_TGD, pages, place_T, scales)


__all__ = ["FP8", "UNSCALED", "PageScales", "as_bytes", "store", "stored"]
