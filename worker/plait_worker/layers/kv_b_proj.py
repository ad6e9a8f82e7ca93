"""MLA's up-projection ``kv_b_proj``: keys and values of every head from the cached latent (arXiv 2405.04434).

Shapes: N tokens, H heads; C elements cached of a token: L of its latent, then R of the key that all heads share;
elements of a head: O of a key made from the latent, E = O + R of a key, V of a value; X = O + V.
"""

from __future__ import annotations

from typing import Protocol

import torch
from plait_kernels.linear import Matrix, dense_matrix, is_copy
from torch import Tensor

from plait_worker.model_config import MlaConfig


class KvUpProjection(Protocol):
    """Makes keys and values; holds the matrix."""

    key_HOL: Tensor
    value_HVL: Tensor
    num_more_bytes: int
    """Bytes held beyond the tensor in the files."""

    def __call__(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[N, H, E]`` and values ``[N, H, V]``; a head's elements are contiguous."""
        ...


def kv_up_projection(up_HXL: Tensor, mla: MlaConfig) -> KvUpProjection:
    """The faster one on the matrix's device."""
    return SingleGemmKvUp(up_HXL, mla) if up_HXL.is_cuda else ConcatKvUp(up_HXL, mla)


class ConcatKvUp:
    """A GEMM for keys and values; then the shared key is copied into each head's key."""

    def __init__(self, up_HXL: Tensor, mla: MlaConfig) -> None:
        """Hold the matrix as it is."""
        self.mla = mla
        self.key_HOL, self.value_HVL = torch.split(up_HXL, [mla.nope_dim, mla.value_dim], dim=1)
        self.up: Matrix = dense_matrix(up_HXL.flatten(0, 1))
        self.num_more_bytes = up_HXL.nbytes if is_copy(self.up) else 0

    def __call__(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """See ``KvUpProjection``."""
        mla = self.mla
        latent_NL, key_NR = torch.split(latent_NC, [mla.latent_dim, mla.rope_dim], dim=1)
        kv_NHX = self.up(latent_NL).unflatten(1, (-1, mla.nope_dim + mla.value_dim))
        key_NHO, value_NHV = torch.split(kv_NHX, [mla.nope_dim, mla.value_dim], dim=2)
        key_NHE = key_NHO.new_empty(*key_NHO.shape[:2], mla.query_dim)
        key_NHE[..., : mla.nope_dim] = key_NHO
        key_NHE[..., mla.nope_dim :] = key_NR[:, None]
        return key_NHE, value_NHV


class SingleGemmKvUp:
    """One GEMM makes keys and values: identity rows in its matrix copy the shared key into each head.

    With 512 + 64 elements cached of a token, keys of 128 + 64 and values of 128, it multiplies 1.4 times as much. By
    estimate that costs an H200 as much as another pass over the keys, but it needs no second kernel.
    """

    def __init__(self, up_HXL: Tensor, mla: MlaConfig) -> None:
        """Copy the matrix between identity rows and zeros; ``key_HOL`` and ``value_HVL`` are views of the copy."""
        self.sizes = [mla.query_dim, mla.value_dim]
        num_heads, whole = up_HXL.shape[0], mla.query_dim + mla.value_dim
        whole_HXC = up_HXL.new_zeros(num_heads, whole, mla.cached_dim)
        self.key_HOL = whole_HXC[:, : mla.nope_dim, : mla.latent_dim]
        self.value_HVL = whole_HXC[:, mla.query_dim :, : mla.latent_dim]
        self.key_HOL.copy_(up_HXL[:, : mla.nope_dim])
        self.value_HVL.copy_(up_HXL[:, mla.nope_dim :])
        whole_HXC[:, mla.nope_dim : mla.query_dim, mla.latent_dim :] = torch.eye(mla.rope_dim)
        self.up: Matrix = dense_matrix(whole_HXC.flatten(0, 1))
        self.num_more_bytes = whole_HXC.nbytes - up_HXL.nbytes
        self._heads = (num_heads, whole)

    def __call__(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """See ``KvUpProjection``."""
        key_NHE, value_NHV = self.up(latent_NC).view(len(latent_NC), *self._heads).split(self.sizes, dim=2)
        return key_NHE, value_NHV
