"""The interface of attention backends, and what a backend is made from.

Shapes: T tokens of the step, P those of its prefill rows, B its decode rows; H query heads and G key-value heads of
this rank, D elements of a head; in MLA C elements cached of a token, E in its queries and keys, V in its values; pages
``[N + 1, 2, G, page, D]`` or ``[N + 1, page, C]`` as in ``plait_worker.cache``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from plait_kernels.kv_cache import PageScales
from torch import Tensor

from plait_worker.attention.spec import AttentionSpec, distinct
from plait_worker.graph_sizes import Size
from plait_worker.rows import Rows

SpecT_co = TypeVar("SpecT_co", bound=AttentionSpec, covariant=True)


@dataclass(frozen=True, slots=True)
class BackendRequirements(Generic[SpecT_co]):
    """What a backend is made for."""

    spec: SpecT_co
    page_size: int
    """In tokens."""
    mla_context_chunk_size: int
    """Cached tokens of MLA that one kv_b_proj up-projection takes."""
    max_tokens: int
    """Of one step."""
    device: torch.device


def requirements_for(
    specs: Iterable[AttentionSpec], page_size: int, mla_context_chunk_size: int, max_tokens: int, device: torch.device
) -> list[BackendRequirements[AttentionSpec]]:
    """For each distinct spec of a model's layers, in their order."""
    return [
        BackendRequirements(spec, page_size, mla_context_chunk_size, max_tokens, device) for spec in distinct(specs)
    ]


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


KvBProj = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A layer's way from cached tokens ``[N, C]`` to each head's keys ``[N, H, E]`` and values ``[N, H, V]``."""


class MlaStep(Protocol):
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
        """As in ``MlaShape``."""
        ...

    @property
    def order_T(self) -> Tensor | None:
        """int64: which token of the plan's step stands at each place here; None where each stands at its own.

        All that this class takes and gives of tokens is in this order.
        """
        ...

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """The prefill rows' tokens attend to themselves and, chunk by chunk, to what is cached.

        ``out_PHV``, contiguous, is written.
        """
        ...

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """Absorbed queries attend to the cached tokens as they are: ``[B, H, latent_dim]``."""
        ...


PreparedT_co = TypeVar("PreparedT_co", covariant=True)


class AttentionBackend(Protocol[PreparedT_co]):
    """One way to attend, by ``StepAttention`` or by ``MlaStep``; chosen at start-up."""

    @property
    def name(self) -> str:
        """As ``--attention-backend`` spells it."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a step of decode rows alone uses nothing but the device's tensors."""
        ...

    @property
    def captured_prefill(self) -> CapturedPrefill | None:
        """What captures steps of rows with ``device_lengths`` too; None where only decode rows are captured."""
        ...

    def prepare(self, rows: Rows) -> PreparedT_co:
        """The host's work for one step."""
        ...


class CapturedPrefill(Protocol):
    """Which captured step prefill rows go by, and what is planned on the host before it is replayed.

    Rows are given by the position of their first new token and by how many new tokens they have.
    """

    @property
    def contexts(self) -> Sequence[int]:
        """Cached tokens that captured steps whose prompts are planned have room for; none where nothing is planned."""
        ...

    def choose(self, roomy: Sequence[Size], starts: Sequence[int], lengths: Sequence[int]) -> Size | None:
        """One of the sizes with room; None where the step is better launched kernel by kernel.

        The fewest tokens come first, and of as many the least context.
        """
        ...

    def plan(self, size: Size, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Before a step of this size is captured or replayed: what its kernels read of the host."""
        ...


class UnplannedPrefill:
    """``CapturedPrefill`` of kernels that read all lengths on the device."""

    contexts: Sequence[int] = ()

    def choose(self, roomy: Sequence[Size], _starts: Sequence[int], _lengths: Sequence[int]) -> Size | None:
        """The smallest."""
        return next(iter(roomy), None)

    def plan(self, _size: Size, _starts: Sequence[int], _lengths: Sequence[int]) -> None:
        """Nothing."""
