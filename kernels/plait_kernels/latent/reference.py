"""Latents in torch. Shapes as in ``plait_kernels.latent``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.kv_cache.reference import as_bytes, stored
from plait_kernels.norm.reference import rms_norm
from plait_kernels.rope.reference import apply_rope


class LatentNorm(NamedTuple):
    """The RMS norm of latents."""

    weight_L: Tensor
    eps: float


class AbsorbedQueries(NamedTuple):
    """Queries with the matrix that they absorb."""

    q_BHE: Tensor
    key_HOL: Tensor


class CacheTarget(NamedTuple):
    """Where the latents of some tokens are kept."""

    pages: Tensor
    """``[N, page size, C]``, contiguous, in the dtype of the latents or float8_e4m3fn."""
    slot_mapping_T: Tensor
    """int64: where in the flat pages ``[N * page size, C]`` each token's goes."""
    scale: float = 1.0
    """What a number in the pages stands for, over the number itself; other than 1 only in float8."""


class Tables(NamedTuple):
    """Cosine and sine, float32 ``[T, 1, R]``."""

    cos_T1R: Tensor
    sin_T1R: Tensor

    def part(self, tokens: slice) -> Tables:
        """Those of some tokens."""
        return Tables(self.cos_T1R[tokens], self.sin_T1R[tokens])

    @property
    def width(self) -> int:
        """R."""
        return self.cos_T1R.shape[-1]


def make_latents(cached_TC: Tensor, norm: LatentNorm, tables: Tables) -> Tensor:
    """What is cached of each token, ``[T, C]``: its latent normalised, its key turned."""
    latent_TL, key_TR = torch.split(cached_TC, [len(norm.weight_L), tables.width], dim=1)
    key_T1R = apply_rope(key_TR[:, None], *tables)
    return torch.cat((rms_norm(latent_TL, norm.weight_L, norm.eps), key_T1R[:, 0]), dim=1)


def keep_latents(latent_TC: Tensor, cache: CacheTarget) -> None:
    """Write finished latents into the pages, in the pages' own numbers."""
    pages = as_bytes(cache.pages).view(-1, latent_TC.shape[1])
    pages.index_copy_(0, cache.slot_mapping_T, as_bytes(stored(latent_TC, cache.pages.dtype, cache.scale)))


def store_and_turn(
    cached_TC: Tensor, q_PHE: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.latent.store_and_turn``."""
    latent_TC = make_latents(cached_TC, norm, tables)
    keep_latents(latent_TC, cache)
    return latent_TC, turn_queries(q_PHE, tables.part(slice(len(q_PHE))))


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables) -> Tensor:
    """See ``plait_kernels.latent.absorb``."""
    still_BHO, turning_BHR = torch.split(q_BHE, [key_HOL.shape[1], tables.width], dim=2)
    absorbed_BHL = torch.einsum("bho,hol->bhl", still_BHO, key_HOL)
    return torch.cat((absorbed_BHL, apply_rope(turning_BHR, *tables)), dim=2)


def absorb_and_store(
    queries: AbsorbedQueries, cached_TC: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> Tensor:
    """See ``plait_kernels.latent.absorb_and_store``."""
    keep_latents(make_latents(cached_TC, norm, tables), cache)
    return absorb(*queries, tables)


def turn_queries(q_THE: Tensor, tables: Tables) -> Tensor:
    """The queries with their last R numbers turned."""
    still_THO, turning_THR = torch.split(q_THE, [q_THE.shape[2] - tables.width, tables.width], dim=2)
    return torch.cat((still_THO, apply_rope(turning_THR, *tables)), dim=2)
