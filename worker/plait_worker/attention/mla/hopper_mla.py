"""What the MLA backends on Hopper share; their kernels for absorbed rows differ.

If all prefill rows of a step are short extends, every token is absorbed. Otherwise long prefill rows are decompressed
(``ragged_prefill``), and decode rows and single short extends are absorbed. A captured step does the same with all of
its prefill rows: absorb or decompress.

Shapes: T tokens of the step, A of them absorbed, R rows, W pages in the widest table, H heads, C elements cached of a
token, L of them the latent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.lengths import device_lengths, slot_mapping
from plait_worker.attention.mla.captured_prefill import MlaCapturedPrefill
from plait_worker.attention.mla.ragged_prefill import RaggedPrefill, RaggedStep
from plait_worker.attention.mla.short_extend import (
    OrderedRows,
    are_short_extends,
    is_short_extend,
    short_extends_last,
)
from plait_worker.attention.spec import MlaShape
from plait_worker.nvtx import nvtx_range
from plait_worker.rows import DeviceLengths, Rows

LATENT_DIMS = (512, 576)
"""kv_lora_rank of the kernels, without and with the rope dims."""
_MAX_ABSORBED = 4095
"""Of a step: the limit of FlashMLA's float8 schedule."""
PlannedT = TypeVar("PlannedT")


class AbsorbedTokens(NamedTuple):
    """The absorbed tokens of a step, each a row of its own: tokens of a short extend share their request's table."""

    table_AW: Tensor
    """int32, contiguous."""
    lengths_A: Tensor
    """int32: KV length of each token."""


def absorbed_tokens(rows: Rows, lengths: DeviceLengths | None, first: int) -> AbsorbedTokens:
    """Those of row ``first`` and all after it; ``lengths`` as in ``HopperMla.plan``."""
    first_token = sum(rows.lengths[:first])
    lengths_A = (rows.positions_T[first_token:] + 1).to(torch.int32)
    if lengths is None or first == rows.num_prefill:
        return AbsorbedTokens(rows.page_table_RW[first:], lengths_A)
    return AbsorbedTokens(rows.page_table_RW.index_select(0, lengths.row_T[first_token:]), lengths_A)


@dataclass(frozen=True, slots=True)
class HopperMlaStep(Generic[PlannedT]):
    """``MlaStep`` of these backends."""

    backend: HopperMla[PlannedT]
    num_prefill_tokens: int
    slot_mapping_T: Tensor
    order_T: Tensor | None
    ragged: RaggedStep | None
    absorbed: PlannedT | None

    @property
    def cached_scale(self) -> float:
        """See ``MlaShape``."""
        return self.backend.shape.cached_scale

    @property
    def decode_waits(self) -> bool:
        """See ``MlaStep``."""
        return self.backend.decode_waits

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """See ``MlaStep``."""
        if self.ragged is None:
            raise AssertionError("a step without prefill tokens")
        with nvtx_range("attention: prefill"):
            self.ragged.attend(q_PHE, latent_PC, pages, kv_b_proj, out_PHV)

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """See ``MlaStep``."""
        if self.absorbed is None:
            raise AssertionError("a step without absorbed tokens")
        with nvtx_range("attention: decode"):
            return self.backend.attend(q_BHC, pages, self.absorbed)


class HopperMla(ABC, Generic[PlannedT]):
    """``AttentionBackend`` for compute capability 9.0; subclasses attend with absorbed rows."""

    name: str
    is_capturable: bool
    decode_waits = False
    """See ``MlaStep``."""

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.ragged = RaggedPrefill(requirements)
        self._requirements = requirements

    @cached_property
    def captured_prefill(self) -> MlaCapturedPrefill | None:
        """Made on first use, when steps are captured."""
        return MlaCapturedPrefill(self._requirements, self.ragged.workspace) if self.is_capturable else None

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        shape = requirements.spec
        dims = (shape.latent_dim, shape.cached_dim)
        if dims != LATENT_DIMS:
            latent, shared = LATENT_DIMS[0], LATENT_DIMS[1] - LATENT_DIMS[0]
            raise ValueError(
                f"it takes a kv_lora_rank of {latent} with {shared} rope dims, not {dims[0]} with {dims[1] - dims[0]}; "
                "use torch"
            )
        RaggedPrefill.validate(shape)

    @abstractmethod
    def plan(self, rows: Rows, lengths: DeviceLengths | None, first: int) -> PlannedT:
        """Metadata of the absorbed rows: row ``first`` and all after it.

        ``lengths`` is None if all rows decode.
        """

    @abstractmethod
    def attend(self, q_AHC: Tensor, pages: Tensor, planned: PlannedT) -> Tensor:
        """Attention of absorbed queries: ``[A, H, L]``."""

    def prepare(self, rows: Rows) -> HopperMlaStep[PlannedT]:
        """Order of the rows, lengths and tables."""
        ordered = self._order_rows(rows)
        rows, first = ordered.rows, ordered.num_decompressed
        lengths = device_lengths(rows)
        return HopperMlaStep(
            backend=self,
            num_prefill_tokens=ordered.num_decompressed_tokens,
            slot_mapping_T=slot_mapping(rows, lengths, self.page_size),
            order_T=ordered.order_T,
            ragged=self._ragged_step(rows, first) if first else None,
            absorbed=self.plan(rows, lengths, first) if first < rows.num_rows else None,
        )

    def _ragged_step(self, rows: Rows, num_decompressed: int) -> RaggedStep:
        """Of the first rows: planned now, or before each replay."""
        context = None if rows.device_lengths is None else rows.device_lengths.context
        if context is None or (prompts := self.captured_prefill) is None:
            return self.ragged.plan(rows, num_decompressed)
        return prompts.step(rows, context)

    def _order_rows(self, rows: Rows) -> OrderedRows:
        all_decompressed = OrderedRows(rows, rows.num_prefill, None)
        if rows.device_lengths is not None:
            return OrderedRows(rows, 0, None) if rows.device_lengths.context is None else all_decompressed
        num = rows.num_prefill
        is_absorbed = are_short_extends(rows.starts[:num], rows.lengths[:num])
        ordered = OrderedRows(rows, 0, None) if is_absorbed else short_extends_last(rows, is_short_extend)
        return ordered if rows.num_tokens - ordered.num_decompressed_tokens <= _MAX_ABSORBED else all_decompressed
