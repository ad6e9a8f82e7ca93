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


def places(table_RW: Tensor, row_T: Tensor | None, positions_T: Tensor, page_size: int) -> Tensor:
    """int64 ``[T]``: page times page size plus offset, where each token is kept.

    Position ``positions_T[t]`` (int64) of row ``row_T[t]`` (int64; of row t where that is None), whose pages
    ``table_RW`` (int32) names.
    """
    solution = triton_solution(__name__, "places_triton") if positions_T.is_cuda else reference
    place_T: Tensor = solution.places(table_RW, row_T, positions_T, page_size)
    return place_T


__all__ = ["FP8", "UNSCALED", "PageScales", "as_bytes", "places", "store", "stored"]
