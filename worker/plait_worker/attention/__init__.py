"""Attention over the paged cache: the interface of the backends, and the choice among them.

Shapes: T tokens of the step, P those of its prefill rows, B its decode rows; H query heads and G key-value
heads of this rank, D numbers in a head; C numbers cached of a token in latent attention, E in its queries
and keys, V in its values; pages ``[N + 1, 2, G, page, D]`` or ``[N + 1, page, C]`` as in ``plait_worker.cache``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales
from torch import Tensor

from plait_worker.attention.captured import CapturedPrompts
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of a model before the first step; counts are this rank's."""

    num_heads: int
    """H."""
    num_kv_heads: int
    """G, a divisor of H."""
    head_dim: int
    """D."""
    scale: float
    """Factor of the scores before the softmax."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    fp8: PageScales | None = None
    """Set where the pages keep keys and values as float8_e4m3fn, divided by these; else they are of ``dtype``."""

    @property
    def cached_dtype(self) -> torch.dtype:
        """Of the pages."""
        return self.dtype if self.fp8 is None else FP8

    @property
    def scales(self) -> PageScales:
        """What a number in the pages stands for, over the number itself."""
        return self.fp8 or UNSCALED


class StepAttention(Protocol):
    """The attention of one step: made once by ``prepare``, called once a layer."""

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor) -> Tensor:
        """Write the step's keys and values into the layer's pages, then attend: ``out_THD``."""
        ...


@runtime_checkable
class SlotMappedStep(StepAttention, Protocol):
    """One that says where the step's keys and values go, for whoever writes them with less work."""

    @property
    def slot_mapping_T(self) -> Tensor:
        """int64: page times page size plus offset of each token."""
        ...

    @property
    def scales(self) -> PageScales:
        """Of what is written."""
        ...

    def attend(self, q_THD: Tensor, pages: Tensor) -> Tensor:
        """Attend over pages that hold the step's keys and values: ``out_THD``."""
        ...


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What a backend of multi-head latent attention (arXiv 2405.04434) must know; heads are this rank's."""

    num_heads: int
    """H."""
    latent_dim: int
    """The first numbers of a cached token: what its values are made from."""
    cached_dim: int
    """C: the latent, then the key that all heads share."""
    query_dim: int
    """E."""
    value_dim: int
    """V."""
    scale: float
    """Factor of the scores before the softmax."""
    dtype: torch.dtype
    """Of queries and of the step's own latents."""
    cached_dtype: torch.dtype
    """Of the pages: ``dtype``, or float8_e4m3fn."""
    cached_scale: float = 1.0
    """What a number in the pages stands for, over the number itself; other than 1 only in float8."""


Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A layer's way from cached tokens ``[N, C]`` to each head's keys ``[N, H, E]`` and values ``[N, H, V]``."""


class LatentStep(Protocol):
    """The latent attention of one step: made once by ``prepare``, called once a layer.

    First the step's tokens go into the layer's pages, where ``slot_mapping_T`` says, divided by ``cached_scale``.
    """

    @property
    def num_prefill_tokens(self) -> int:
        """P; the tokens behind them attend to latents as they are, as decode rows do."""
        ...

    @property
    def slot_mapping_T(self) -> Tensor:
        """int64: where in the flat pages ``[pages * page size, C]`` the step's tokens go."""
        ...

    @property
    def cached_scale(self) -> float:
        """As in ``LatentShape``."""
        ...

    @property
    def order_T(self) -> Tensor | None:
        """int64: which token of the plan's step stands at each place here; None where each stands at its own.

        All that this class takes and gives of tokens is in this order.
        """
        ...

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, expand: Expand, out_PHV: Tensor) -> None:
        """The prefill rows' tokens attend to themselves and, chunk by chunk, to what is cached.

        ``out_PHV``, contiguous, is written.
        """
        ...

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """Absorbed queries attend to the cached tokens as they are: ``[B, H, latent_dim]``."""
        ...


PreparedT_co = TypeVar("PreparedT_co", covariant=True)


class AttentionBackend(Protocol[PreparedT_co]):
    """One way to attend, by ``StepAttention`` or by ``LatentStep``; chosen at start-up."""

    @property
    def name(self) -> str:
        """As ``--attention-backend`` spells it."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a step of decode rows alone uses nothing but the device's tensors."""
        ...

    @property
    def captured_prompts(self) -> CapturedPrompts | None:
        """What captures steps of rows with ``device_lengths`` too; None where only decode rows are captured."""
        ...

    def prepare(self, rows: Rows) -> PreparedT_co:
        """The host's work for one step."""
        ...
