"""Multi-head latent attention, MLA (arXiv 2405.04434): rope, cache writes and weight absorption.

Shapes: T tokens of a step, the first P of them prefill tokens, B whose queries are absorbed, H heads; E dims of a
head's query (O without rope, then R with it), V dims of a value, L dims of a latent, C = L + R cached of a token;
pages ``[N, page size, C]``. Tables are those of ``plait_kernels.rope.rope_tables``, ``[T, 1, R]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.backends import Backend, Op, of_dtype, on_device, up_to
from plait_kernels.mla.reference import AbsorbedQueries, CacheTarget, MlaNorm, Tables, store_latent

_BACKENDS = Backend("triton", (on_device("cuda"),)), Backend("reference")
_rope_and_cache = Op(__name__, "rope_and_cache", *_BACKENDS)
_absorb = Op(__name__, "absorb", *_BACKENDS)
_absorb_and_cache = Op(__name__, "absorb_and_cache", *_BACKENDS)
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


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables) -> Tensor:
    """Absorbed queries ``[B, H, C]``: their scores with cache entries are those of the rotated ``q`` with the keys.

    ``key_HOL`` is the keys' half of ``kv_b_proj``.
    """
    q_BHC: Tensor = _absorb(q_BHE)(q_BHE, key_HOL, tables)
    return q_BHC


def absorb_and_cache(
    queries: AbsorbedQueries, cached_TC: Tensor, norm: MlaNorm, tables: Tables, cache: CacheTarget
) -> Tensor:
    """``absorb(*queries, tables)`` for a step of decode rows only, which also writes each token's cache entry."""
    q_THC: Tensor = _absorb_and_cache(cached_TC)(queries, cached_TC, norm, tables, cache)
    return q_THC


def up_project_values(out_BHL: Tensor, value_HVL: Tensor, out_BHV: Tensor) -> None:
    """Each head's values from the latent that attention gave each row, written to ``out_BHV``.

    ``value_HVL`` is the values' half of ``kv_b_proj``.
    """
    size = min(len(out_BHL), _MAX_GEMV_ROWS + 1)  # no rule tells larger sizes apart
    _up_project_values(out_BHL, size)(out_BHL, value_HVL, out_BHV)


__all__ = [
    "AbsorbedQueries",
    "CacheTarget",
    "MlaNorm",
    "Tables",
    "absorb",
    "absorb_and_cache",
    "rope_and_cache",
    "store_latent",
    "up_project_values",
]
