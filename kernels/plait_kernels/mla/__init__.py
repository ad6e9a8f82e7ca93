"""Multi-head latent attention, MLA (arXiv 2405.04434): rope, cache writes and weight absorption.

Shapes: T tokens of a step, the first P of them prefill tokens, B whose queries are absorbed, H heads; E dims of a
head's query (O without rope, then R with it), V dims of a value, L dims of a latent, C = L + R cached of a token;
pages ``[N, page size, C]``. Tables are those of ``plait_kernels.rope.rope_tables``, ``[T, 1, R]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.attention.reference import SplitKvSchedule
from plait_kernels.backends import Backend, Op, of_dtype, on_device, up_to
from plait_kernels.mla.reference import AbsorbedQueries, AbsorbedRows, CacheTarget, MlaNorm, Tables, store_latent

_BACKENDS = Backend("triton", (on_device("cuda"),)), Backend("reference")
_rope_and_cache = Op(__name__, "rope_and_cache", *_BACKENDS)
_absorb = Op(__name__, "absorb", *_BACKENDS)
_absorb_and_cache = Op(__name__, "absorb_and_cache", *_BACKENDS)
_DECODE = Backend("decode_triton", (on_device("cuda"), of_dtype(torch.bfloat16, torch.float16))), Backend("reference")
_decode_absorbed = Op(__name__, "decode_absorbed", *_DECODE)
_schedule_absorbed = Op(__name__, "schedule_absorbed", *_DECODE)
_MAX_GEMV_ROWS = 4
_up_project_values = Op(
    __name__,
    "up_project_values",
    Backend(
        "values_triton", (on_device("cuda"), of_dtype(torch.bfloat16, torch.float16), up_to(_MAX_GEMV_ROWS, "rows"))
    ),
    Backend("reference"),
)
"""The size of a call is its number of rows: a program of the kernel takes them one by one."""


def rope_and_cache(
    cached_TC: Tensor, q_PHE: Tensor, norm: MlaNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """Each token's cache entry, ``[T, C]``, and the first tokens' queries with their last R dims rotated.

    An entry is the normalised latent and the rotated key; it is written into the pages too. On a GPU queries are
    rotated in place. ``cached_TC`` and ``q_PHE`` may be slices of wider rows.
    """
    latent_TC, rotated_PHE = _rope_and_cache(cached_TC)(cached_TC, q_PHE, norm, tables, cache)
    return latent_TC, rotated_PHE


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables, *, next_waits: bool = False) -> Tensor:
    """Absorbed queries ``[B, H, C]``: their scores with cache entries are those of the rotated ``q`` with the keys.

    ``key_HOL`` is the keys' half of ``kv_b_proj``. ``next_waits`` says that the kernel after this one on the GPU waits
    for it inside (``plait_kernels.pdl``), so that it may start early.
    """
    q_BHC: Tensor = _absorb(q_BHE)(q_BHE, key_HOL, tables, next_waits)
    return q_BHC


def absorb_and_cache(
    queries: AbsorbedQueries,
    cached_TC: Tensor,
    norm: MlaNorm,
    tables: Tables,
    cache: CacheTarget,
    *,
    next_waits: bool = False,
) -> Tensor:
    """``absorb(*queries, tables)`` for a step of decode rows only, which also writes each token's cache entry."""
    q_THC: Tensor = _absorb_and_cache(cached_TC)(queries, cached_TC, norm, tables, cache, next_waits)
    return q_THC


def schedule_absorbed(
    lengths_B: Tensor, dtype: torch.dtype, page_size: int, num_heads: int, latent_dim: int
) -> SplitKvSchedule | None:
    """The split-KV schedule of a step's absorbed rows, for ``decode_absorbed`` of every layer.

    ``lengths_B`` is int32 and is read on the device: nothing waits. ``dtype`` is the queries'. None without rows, and
    where the reference attends.
    """
    if not len(lengths_B):
        return None
    like = torch.empty(0, dtype=dtype, device=lengths_B.device)
    schedule: SplitKvSchedule | None = _schedule_absorbed(like)(lengths_B, page_size, num_heads, latent_dim)
    return schedule


def decode_absorbed(q_BHC: Tensor, pages: Tensor, rows: AbsorbedRows, scale: float, out_BHL: Tensor) -> None:
    """Absorbed queries of one token a row over the row's pages, ``[N, page size, C]``: ``out_BHL`` is written.

    Scores are over all C elements; what is summed is the first L of them.

    On a GPU the table and schedule may be read while the kernel before still runs, which is ``absorb_and_cache`` or
    ``absorb``, told that the next kernel waits: write them before that.
    """
    if len(q_BHC):
        _decode_absorbed(q_BHC)(q_BHC, pages, rows, scale, out_BHL)


def up_project_values(out_BHL: Tensor, value_HVL: Tensor, out_BHV: Tensor) -> None:
    """Each head's values from the latent that attention gave each row, written to ``out_BHV``.

    ``value_HVL`` is the values' half of ``kv_b_proj``.
    """
    size = min(len(out_BHL), _MAX_GEMV_ROWS + 1)  # no rule tells larger sizes apart
    _up_project_values(out_BHL, size)(out_BHL, value_HVL, out_BHV)


__all__ = [
    "AbsorbedQueries",
    "AbsorbedRows",
    "CacheTarget",
    "MlaNorm",
    "Tables",
    "absorb",
    "absorb_and_cache",
    "decode_absorbed",
    "rope_and_cache",
    "schedule_absorbed",
    "store_latent",
    "up_project_values",
]
