"""MLA's rope, cache writes and absorption in torch. Shapes as in ``plait_kernels.mla``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.attention.reference import SplitKvSchedule, attend
from plait_kernels.kv_cache.reference import as_bytes, to_cache_dtype
from plait_kernels.norm.reference import rms_norm
from plait_kernels.rope.reference import apply_rope


class MlaNorm(NamedTuple):
    """The RMS norm of the latent (``kv_a_layernorm``)."""

    weight_L: Tensor
    eps: float


class AbsorbedQueries(NamedTuple):
    """Queries, and the keys' half of ``kv_b_proj`` that they absorb."""

    q_BHE: Tensor
    key_HOL: Tensor


class CacheTarget(NamedTuple):
    """Where the cache entries of some tokens go."""

    pages: Tensor
    """``[N, page size, C]``, contiguous, in the dtype of the entries or float8_e4m3fn."""
    slot_mapping_T: Tensor
    """int64: row of the flat pages ``[N * page size, C]`` for each token."""
    scale: float = 1.0
    """Value over stored element; other than 1 only in float8."""


class Tables(NamedTuple):
    """Cosine and sine, float32 ``[T, 1, R]``."""

    cos_T1R: Tensor
    sin_T1R: Tensor

    def part(self, tokens: slice) -> Tables:
        """Those of some tokens."""
        return Tables(self.cos_T1R[tokens], self.sin_T1R[tokens])

    @property
    def rotary_dim(self) -> int:
        """R."""
        return self.cos_T1R.shape[-1]


class AbsorbedRows(NamedTuple):
    """B rows of one query token each, over their pages; all on the device."""

    table_BW: Tensor
    """int32: each row's pages."""
    lengths_B: Tensor
    """int32, at least 1: tokens that the row sees."""
    schedule: SplitKvSchedule | None
    """What ``schedule_absorbed`` made of these lengths."""


def make_latent(cached_TC: Tensor, norm: MlaNorm, tables: Tables) -> Tensor:
    """Cache entries ``[T, C]``: the normalised latent and the rotated key."""
    latent_TL, key_TR = torch.split(cached_TC, [len(norm.weight_L), tables.rotary_dim], dim=1)
    key_T1R = apply_rope(key_TR[:, None], *tables)
    return torch.cat((rms_norm(latent_TL, norm.weight_L, norm.eps), key_T1R[:, 0]), dim=1)


def store_latent(latent_TC: Tensor, cache: CacheTarget) -> None:
    """Write cache entries into the pages, in the pages' dtype."""
    pages = as_bytes(cache.pages).view(-1, latent_TC.shape[1])
    pages.index_copy_(0, cache.slot_mapping_T, as_bytes(to_cache_dtype(latent_TC, cache.pages.dtype, cache.scale)))


def rope_and_cache(
    cached_TC: Tensor, q_PHE: Tensor, norm: MlaNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.mla.rope_and_cache``."""
    latent_TC = make_latent(cached_TC, norm, tables)
    store_latent(latent_TC, cache)
    return latent_TC, rotate_queries(q_PHE, tables.part(slice(len(q_PHE))))


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables, _next_waits: bool = False) -> Tensor:
    """See ``plait_kernels.mla.absorb``."""
    nope_BHO, rope_BHR = torch.split(q_BHE, [key_HOL.shape[1], tables.rotary_dim], dim=2)
    absorbed_BHL = torch.einsum("bho,hol->bhl", nope_BHO, key_HOL)
    return torch.cat((absorbed_BHL, apply_rope(rope_BHR, *tables)), dim=2)


def absorb_and_cache(
    queries: AbsorbedQueries,
    cached_TC: Tensor,
    norm: MlaNorm,
    tables: Tables,
    cache: CacheTarget,
    _next_waits: bool = False,
) -> Tensor:
    """See ``plait_kernels.mla.absorb_and_cache``."""
    store_latent(make_latent(cached_TC, norm, tables), cache)
    return absorb(*queries, tables)


def schedule_absorbed(_lengths_B: Tensor, _page_size: int, _num_heads: int, _latent_dim: int) -> SplitKvSchedule | None:
    """None: ``decode_absorbed`` computes row by row."""
    return None


def decode_absorbed(q_BHC: Tensor, pages: Tensor, rows: AbsorbedRows, scale: float, out_BHL: Tensor) -> None:
    """See ``plait_kernels.mla.decode_absorbed``; row by row."""
    for row, length in enumerate(rows.lengths_B.tolist()):
        cached_S1C = pages[rows.table_BW[row].long()].flatten(0, 1)[:length, None].to(q_BHC.dtype)
        latent_S1L = cached_S1C[..., : out_BHL.shape[2]]
        out_BHL[row] = attend(q_BHC[row : row + 1], cached_S1C, latent_S1L, scale)[0]


def up_project_values(out_BHL: Tensor, value_HVL: Tensor, out_BHV: Tensor) -> None:
    """See ``plait_kernels.mla.up_project_values``."""
    torch.bmm(out_BHL.transpose(0, 1), value_HVL.transpose(1, 2), out=out_BHV.transpose(0, 1))


def rotate_queries(q_THE: Tensor, tables: Tables) -> Tensor:
    """The queries with their last R dims rotated."""
    nope_THO, rope_THR = torch.split(q_THE, [q_THE.shape[2] - tables.rotary_dim, tables.rotary_dim], dim=2)
    return torch.cat((nope_THO, apply_rope(rope_THR, *tables)), dim=2)
