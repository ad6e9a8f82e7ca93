"""Around latent attention (arXiv 2405.04434): what is cached of a token, and queries that attend to it.

Shapes: T tokens of a step, the first P of them prefill tokens, B that attend to latents as they are, H heads; numbers:
E in a head's query (O that rope does not turn, then R that it turns), L in a latent, C = L + R cached of a token; pages
``[N, page size, C]``. Tables are those of ``plait_kernels.rope.rope_tables``, ``[T, 1, R]``.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.latent import reference
from plait_kernels.latent.reference import AbsorbedQueries, CacheTarget, LatentNorm, Tables, keep_latents


def store_and_turn(
    cached_TC: Tensor, q_PHE: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """What is cached of each token, ``[T, C]``, its latent normalised, its key turned; written into the pages too.

    And the queries of the first tokens with their last R numbers turned; a GPU turns them where they lie. Both may be
    parts of wider rows.
    """
    backend = triton_backend(__name__) if cached_TC.is_cuda else reference
    latent_TC, turned_PHE = backend.store_and_turn(cached_TC, q_PHE, norm, tables, cache)
    return latent_TC, turned_PHE


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables) -> Tensor:
    """Queries ``[B, H, C]`` that see in latents what ``q``, once turned, sees in the keys that ``key_HOL`` makes."""
    backend = triton_backend(__name__) if q_BHE.is_cuda else reference
    q_BHC: Tensor = backend.absorb(q_BHE, key_HOL, tables)
    return q_BHC


def absorb_and_store(
    queries: AbsorbedQueries, cached_TC: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> Tensor:
    """``absorb(*queries, tables)`` of steps of nothing but decode rows; the pages get each token's latent too."""
    backend = triton_backend(__name__) if cached_TC.is_cuda else reference
    q_THC: Tensor = backend.absorb_and_store(queries, cached_TC, norm, tables, cache)
    return q_THC


__all__ = [
    "AbsorbedQueries",
    "CacheTarget",
    "LatentNorm",
    "Tables",
    "absorb",
    "absorb_and_store",
    "keep_latents",
    "store_and_turn",
]
