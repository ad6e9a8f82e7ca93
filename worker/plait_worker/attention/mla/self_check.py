"""The self-check of MLA, between its projections.

Shapes as in ``plait_worker.attention.backend``; O elements of a head that rope does not rotate, L of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from plait_kernels.mla import CacheTarget, store_latent
from torch import Tensor

from plait_worker.attention.backend import AttentionBackend, BackendRequirements, MlaStep
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.self_check import NUM_PAGES, SelfCheck
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import Rows


class MlaSelfCheck(SelfCheck):
    """Random inputs, projections included."""

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        super().__init__(requirements, TorchMla(requirements))
        self.shape = shape = requirements.spec
        self.pages = self.random(NUM_PAGES + 1, requirements.page_size, shape.cached_dim).to(shape.cached_dtype)
        self.nope_dim = shape.query_dim - (shape.cached_dim - shape.latent_dim)
        size = shape.latent_dim**-0.5
        self.key_HOL = self.random(shape.num_heads, self.nope_dim, shape.latent_dim) * size
        self.value_HVL = self.random(shape.num_heads, shape.value_dim, shape.latent_dim) * size

    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        q_THE = self.random(rows.num_tokens, self.shape.num_heads, self.shape.query_dim, generator=generator)
        latent_TC = self.random(rows.num_tokens, self.shape.cached_dim, generator=generator)
        step: MlaStep = backend.prepare(rows)
        if (order_T := step.order_T) is None:
            return lambda: self._layer(step, q_THE, latent_TC)
        inverse_T = order_T.argsort()
        return lambda: self._layer(step, q_THE[order_T], latent_TC[order_T])[inverse_T]

    def _layer(self, step: MlaStep, q_THE: Tensor, latent_TC: Tensor) -> Tensor:
        """``[T, H, V]``, in the step's own order."""
        num = step.num_prefill_tokens
        out_THV = q_THE.new_empty(*q_THE.shape[:2], self.shape.value_dim)
        store_latent(latent_TC, CacheTarget(self.pages, step.slot_mapping_T, step.cached_scale))
        if num > 0:
            step.prefill(q_THE[:num], latent_TC[:num], self.pages, self._kv_b_proj, out_THV[:num])
        if num < len(q_THE):
            out_BHL = step.decode(self._absorb(q_THE[num:]), self.pages)
            out_THV[num:] = torch.einsum("bhl,hvl->bhv", out_BHL, self.value_HVL)
        return out_THV

    def _kv_b_proj(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Views of one tensor, as the models' kv_b_proj returns them."""
        latent_NL, key_NR = latent_NC.split([self.shape.latent_dim, latent_NC.shape[1] - self.shape.latent_dim], dim=1)
        key_NHO = torch.einsum("nl,hol->nho", latent_NL, self.key_HOL)
        shared_NHR = key_NR[:, None].expand(-1, key_NHO.shape[1], -1)
        both = torch.cat((key_NHO, shared_NHR, torch.einsum("nl,hvl->nhv", latent_NL, self.value_HVL)), dim=2)
        return both[..., : self.shape.query_dim], both[..., self.shape.query_dim :]

    def _absorb(self, q_BHE: Tensor) -> Tensor:
        nope_BHO, rope_BHR = q_BHE.split([self.nope_dim, q_BHE.shape[2] - self.nope_dim], dim=2)
        return torch.cat((torch.einsum("bho,hol->bhl", nope_BHO, self.key_HOL), rope_BHR), dim=2)
