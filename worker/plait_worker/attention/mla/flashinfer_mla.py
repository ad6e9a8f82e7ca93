"""flashinfer's paged MLA kernel for Hopper (fa3): rows of any length, planned on the host.

The kernel's plan is called directly: the wrapper's Python takes longer than the kernel. The plan writes pinned memory
that is copied later, so each step in flight has its own buffers.

Shapes: A absorbed tokens in R rows, J pages of them all, H heads, C elements cached of a token, L of them the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flashinfer.mla._batch_mla._backends.fa3_backend import get_batch_mla_module
from flashinfer.utils import MaskMode
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.lengths import indptr, page_indices
from plait_worker.attention.mla.hopper_mla import HopperMla
from plait_worker.attention.plan_ring import PlanRing
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import DeviceLengths, Rows

_WORKSPACE_BYTES = 128 << 20
# Queries times heads of one fa3 tile.
_TILE_QUERIES = 128
_PLAN_BYTES = 8 << 20

KernelPlan = object
"""The result of the kernel's plan, which its run takes."""


@dataclass(frozen=True, slots=True)
class _PlanBuffers:
    """The kernel's work list: pinned, and on the device."""

    on_host: Tensor
    on_device: Tensor


@dataclass(frozen=True, slots=True)
class FlashinferMlaRows:
    """The absorbed rows of a step."""

    pages_J: Tensor
    """int32: the rows' pages, one row after the other."""
    buffers: _PlanBuffers
    plan: KernelPlan


class FlashinferMla(HopperMla[FlashinferMlaRows]):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "flashinfer_mla"
    is_capturable = False

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """See ``HopperMla``; allocates the workspaces."""
        super().__init__(requirements)
        shape, device = requirements.spec, requirements.device
        shared = shape.cached_dim - shape.latent_dim
        kinds = (shape.dtype, shape.cached_dtype, shape.dtype, torch.int32)
        self._module = get_batch_mla_module("fa3", *kinds, shape.latent_dim, shared, False)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ring = PlanRing(lambda: _plan_buffers(device), device)

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """See ``HopperMla``."""
        HopperMla.validate(requirements)
        shape = requirements.spec
        if _TILE_QUERIES % shape.num_heads:
            raise ValueError(
                f"its kernel may drop a visible key if the heads of a rank ({shape.num_heads}) do not divide "
                f"{_TILE_QUERIES}; use flashmla or another --tp"
            )

    def plan(self, rows: Rows, _lengths: DeviceLengths | None, first: int) -> FlashinferMlaRows:
        """The kernel's work list for the absorbed rows."""
        part = slice(first, rows.num_rows)
        lengths_R = np.array(rows.lengths[part])
        seen_R = np.array(rows.starts[part]) + lengths_R
        num_R = -(-seen_R // self.page_size)
        with self._ring.take() as buffers:
            plan = self._module.plan(
                self._workspace,
                buffers.on_device,
                buffers.on_host,
                indptr(lengths_R),
                indptr(num_R),
                torch.from_numpy(seen_R.astype(np.int32)),
                self.shape.num_heads,
                self.shape.latent_dim,
                True,
            )
        return FlashinferMlaRows(page_indices(rows.page_table_RW[part], num_R), buffers, plan)

    def attend(self, q_AHC: Tensor, pages: Tensor, planned: FlashinferMlaRows) -> Tensor:
        """See ``HopperMla``."""
        latent = self.shape.latent_dim
        out_AHL = q_AHC.new_empty(*q_AHC.shape[:2], latent)
        self._module.run(
            self._workspace,
            planned.buffers.on_device,
            planned.plan,
            q_AHC[..., :latent],
            q_AHC[..., latent:],
            pages[..., :latent],
            pages[..., latent:],
            planned.pages_J,
            out_AHL,
            None,
            MaskMode.CAUSAL.value,
            self.shape.num_heads,
            self.page_size,
            self.shape.scale,
            False,
            self.shape.cached_scale,
            self.shape.cached_scale,
            None,
        )
        return out_AHL


def _plan_buffers(device: torch.device) -> _PlanBuffers:
    on_host = torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
    return _PlanBuffers(on_host, torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device))
