"""How keys and values of every head are made from what is cached of a token (arXiv 2405.04434).

Shapes: N tokens, H heads; C numbers cached of a token: L of its latent, then R of the key that all heads share;
numbers of a head: O of a key that the latent makes, E = O + R of a key, V of a value; X = O + V.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from plait_worker.layers.matrix import Matrix, is_copy, matrix
from plait_worker.model_config import MlaConfig


class KvUpProjection(Protocol):
    """Makes keys and values, and holds the matrices that make them."""

    key_HOL: Tensor
    value_HVL: Tensor
    num_more_bytes: int
    """Held beside the tensor that it was made from, or beyond that where it took the tensor's place."""

    def __call__(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's keys ``[N, H, E]`` and values ``[N, H, V]``; numbers of a head lie side by side."""
        ...


def kv_up_projection(up_HXL: Tensor, mla: MlaConfig) -> KvUpProjection:
    """The fastest way for the matrices' device."""
    return SingleGemmKvUp(up_HXL, mla) if up_HXL.is_cuda else ConcatKvUp(up_HXL, mla)


class ConcatKvUp:
    """The shared key is copied beside each head's own."""

    def __init__(self, up_HXL: Tensor, mla: MlaConfig) -> None:
        """Hold the matrices as they are."""
        self.mla = mla
        self.key_HOL, self.value_HVL = torch.split(up_HXL, [mla.nope_dim, mla.value_dim], dim=1)
        self.up: Matrix = matrix(up_HXL.flatten(0, 1))
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
    """One product makes all of it: rows of the unit matrix bring the shared key to each head, number for number.

    For 512 + 64 numbers of a token and heads of 128 + 64 and 128 it multiplies 1.4 times as much, by reckoning what
    one more pass over the keys would take on an H200; nothing follows it, and attention reads keys where it left them.
    """

    def __init__(self, up_HXL: Tensor, mla: MlaConfig) -> None:
        """Copy the matrices between the unit matrix's rows and zeros, where ``key_HOL`` and ``value_HVL`` read them."""
        self.sizes = [mla.query_dim, mla.value_dim]
        num_heads, whole = up_HXL.shape[0], mla.query_dim + mla.value_dim
        whole_HXC = up_HXL.new_zeros(num_heads, whole, mla.cached_dim)
        self.key_HOL = whole_HXC[:, : mla.nope_dim, : mla.latent_dim]
        self.value_HVL = whole_HXC[:, mla.query_dim :, : mla.latent_dim]
        self.key_HOL.copy_(up_HXL[:, : mla.nope_dim])
        self.value_HVL.copy_(up_HXL[:, mla.nope_dim :])
        whole_HXC[:, mla.nope_dim : mla.query_dim, mla.latent_dim :] = torch.eye(mla.rope_dim)
        self.up: Matrix = matrix(whole_HXC.flatten(0, 1))
        self.num_more_bytes = whole_HXC.nbytes - up_HXL.nbytes
        self._heads = (num_heads, whole)

    def __call__(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """See ``KvUpProjection``."""
        key_NHE, value_NHV = self.up(latent_NC).view(len(latent_NC), *self._heads).split(self.sizes, dim=2)
        return key_NHE, value_NHV
