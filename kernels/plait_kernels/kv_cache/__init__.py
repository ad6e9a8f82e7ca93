"""Writes of a step's keys and values to the pages of the cache, and where they go."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Op, on_device
from plait_kernels.kv_cache.reference import FP8, UNSCALED, PageScales, as_bytes, to_cache_dtype

_REFERENCE = Backend("reference")
_store = Op(__name__, "store", Backend("triton", (on_device("cuda"),)), _REFERENCE)
_slot_mapping = Op(__name__, "slot_mapping", Backend("slot_mapping_triton", (on_device("cuda"),)), _REFERENCE)


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, slot_mapping_T: Tensor, scales: PageScales = UNSCALED) -> None:
    """Write token t's keys and values to token ``slot_mapping_T[t] % P`` of page ``slot_mapping_T[t] // P``.

    ``pages`` is ``[N, 2, G, P, D]``, contiguous, in the dtype of the keys or float8_e4m3fn; ``slot_mapping_T`` int64.
    """
    _store(pages)(k_TGD, v_TGD, pages, slot_mapping_T, scales)


def slot_mapping(table_RW: Tensor, row_T: Tensor | None, positions_T: Tensor, page_size: int) -> Tensor:
    """int64 ``[T]``: page times page size plus offset of each token.

    Position ``positions_T[t]`` (int64) of row ``row_T[t]`` (int64; of row t if that is None), whose pages
    ``table_RW`` (int32) names.
    """
    slot_mapping_T: Tensor = _slot_mapping(positions_T)(table_RW, row_T, positions_T, page_size)
    return slot_mapping_T


__all__ = ["FP8", "UNSCALED", "PageScales", "as_bytes", "slot_mapping", "store", "to_cache_dtype"]
