"""Latent attention on Hopper: what the backends share, whose kernels differ in the absorbed half.

Where a step's prefill rows are short appends, every token of the step attends to the cached latents as decode rows do.
Otherwise its long prefill rows get keys and values of every head (``ragged_latent``), and decode rows and single short
appends are absorbed. A captured step does one or the other with all of its prefill rows.

Shapes: T tokens of the step, A of them absorbed, R rows, H heads, C cached of a token, L of it the latent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.lengths import device_lengths, slot_mapping
from plait_worker.attention.mla.captured_prefill import MlaCapturedPrefill
from plait_worker.attention.mla.ragged_prefill import RaggedPrefill, RaggedStep
from plait_worker.attention.mla.short_extend import OrderedRows, is_short, is_short_beside_others, short_last
from plait_worker.attention.spec import MlaShape
from plait_worker.nvtx import nvtx_range
from plait_worker.rows import DeviceLengths, Rows

LATENT_DIMS = (512, 576)
"""Numbers of a latent, and of it with the shared key, that the kernels were built for."""
_MOST_ABSORBED = 4095
"""Tokens of a step: FlashMLA's schedule over float8 takes no more rows."""
PlannedT = TypeVar("PlannedT")


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
    """``AttentionBackend`` for compute capability 9.0, but for its absorbed half."""

    name: str
    is_capturable: bool

    @property
    @abstractmethod
    def captured_prefill(self) -> MlaCapturedPrefill | None:
        """See ``AttentionBackend``."""

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.ragged = RaggedPrefill(requirements)

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """Raise ``ValueError`` with the rule that the kernels would break."""
        shape = requirements.spec
        dims = (shape.latent_dim, shape.cached_dim)
        if dims != LATENT_DIMS:
            latent, shared = LATENT_DIMS[0], LATENT_DIMS[1] - LATENT_DIMS[0]
            raise ValueError(
                f"it takes latents of {latent} numbers with a shared key of {shared}, not of {dims[0]} with one of "
                f"{dims[1] - dims[0]}"
            )
        RaggedPrefill.validate(shape)

    @abstractmethod
    def plan(self, rows: Rows, lengths: DeviceLengths | None, first: int) -> PlannedT:
        """What the absorbed half needs of a step: of row ``first`` and all behind it.

        ``lengths`` is None where all rows decode.
        """

    @abstractmethod
    def attend(self, q_AHC: Tensor, pages: Tensor, planned: PlannedT) -> Tensor:
        """Absorbed queries over the cached tokens: ``[A, H, L]``."""

    def prepare(self, rows: Rows) -> HopperMlaStep[PlannedT]:
        """The step's way, lengths and tables."""
        ordered = self._order(rows)
        rows, first = ordered.rows, ordered.num_long
        lengths = device_lengths(rows)
        return HopperMlaStep(
            backend=self,
            num_prefill_tokens=ordered.num_long_tokens,
            slot_mapping_T=slot_mapping(rows, lengths, self.page_size),
            order_T=ordered.order_T,
            ragged=self._ragged_step(rows, first) if first else None,
            absorbed=self.plan(rows, lengths, first) if first < rows.num_rows else None,
        )

    def _ragged_step(self, rows: Rows, num_long: int) -> RaggedStep:
        """The first rows', planned now, or before the step is replayed."""
        context = None if rows.device_lengths is None else rows.device_lengths.context
        if context is None or (prompts := self.captured_prefill) is None:
            return self.ragged.plan(rows, num_long)
        return prompts.step(rows, context)

    def _order(self, rows: Rows) -> OrderedRows:
        all_long = OrderedRows(rows, rows.num_prefill, None)
        if rows.device_lengths is not None:
            return OrderedRows(rows, 0, None) if rows.device_lengths.context is None else all_long
        num = rows.num_prefill
        is_absorbed = is_short(rows.starts[:num], rows.lengths[:num])
        ordered = OrderedRows(rows, 0, None) if is_absorbed else short_last(rows, is_short_beside_others)
        return ordered if rows.num_tokens - ordered.num_long_tokens <= _MOST_ABSORBED else all_long
