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
from plait_worker.graph_sizes import GraphSize
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

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """Write the step's keys and values into the layer's pages, then attend: ``out_THD``.

        ``scales`` are the layer's. A captured step holds them as constants.
        """
        ...


@runtime_checkable
class SlotMappedStep(StepAttention, Protocol):
    """A step that exposes its slot mapping, so that one kernel can rotate and write the cache."""

    @property
    def slot_mapping_T(self) -> Tensor:
        """int64: page * page_size + offset of each token."""
        ...

    def attend(self, q_THD: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """Attend over pages that already hold the step's keys and values: ``out_THD``."""
        ...


KvBProj = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A layer's kv_b_proj: from cached tokens ``[N, C]`` to keys ``[N, H, E]`` and values ``[N, H, V]`` of each head."""


class MlaStep(Protocol):
    """The MLA of one step: made once by ``prepare``, called once a layer.

    The caller first writes the step's tokens to the layer's pages at ``slot_mapping_T``, divided by ``cached_scale``.
    """

    @property
    def num_prefill_tokens(self) -> int:
        """P; the tokens after them are absorbed, as decode rows are."""
        ...

    @property
    def slot_mapping_T(self) -> Tensor:
        """int64: where in the flat pages ``[pages * page_size, C]`` the step's tokens go."""
        ...

    @property
    def cached_scale(self) -> float:
        """As in ``MlaShape``."""
        ...

    @property
    def order_T(self) -> Tensor | None:
        """int64: the plan's token at each index here; None if the order is the plan's.

        All inputs and outputs of this class are in this order.
        """
        ...

    @property
    def decode_waits(self) -> bool:
        """Whether ``decode`` on a GPU waits inside for the kernel before it, which may then let it start early."""
        ...

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """Prefill rows attend to their new tokens and, chunk by chunk, to their cached context.

        Writes ``out_PHV``, which is contiguous.
        """
        ...

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """Absorbed queries attend to the latent cache: ``[B, H, latent_dim]``."""
        ...


PreparedT_co = TypeVar("PreparedT_co", covariant=True)


class AttentionBackend(Protocol[PreparedT_co]):
    """A backend, chosen at start; it prepares a ``StepAttention`` or an ``MlaStep``."""

    @property
    def name(self) -> str:
        """As ``--attention-backend`` spells it."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold a step of decode rows: it reads device tensors only."""
        ...

    @property
    def captured_prefill(self) -> CapturedPrefill | None:
        """How graphs hold prefill rows too; None if only decode rows are captured."""
        ...

    def prepare(self, rows: Rows) -> PreparedT_co:
        """The host's work for one step, done once for all layers of the spec."""
        ...


class CapturedPrefill(Protocol):
    """Chooses the graph for a step with prefill rows, and plans on the host before its replay.

    Rows are given by the position of their first new token and by their number of new tokens.
    """

    @property
    def contexts(self) -> Sequence[int]:
        """Capacities, in cached tokens, of the planned graphs; empty if nothing is planned."""
        ...

    def choose(self, fitting: Sequence[GraphSize], starts: Sequence[int], lengths: Sequence[int]) -> GraphSize | None:
        """One of the sizes that fit; None if launching kernel by kernel is faster.

        The sizes are sorted by tokens, then by context.
        """
        ...

    def plan(self, size: GraphSize, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Write what the kernels read from the host; called before each capture and replay."""
        ...


class UnplannedPrefill:
    """``CapturedPrefill`` of kernels that read all lengths on the device."""

    contexts: Sequence[int] = ()

    def choose(self, fitting: Sequence[GraphSize], _starts: Sequence[int], _lengths: Sequence[int]) -> GraphSize | None:
        """The smallest size."""
        return next(iter(fitting), None)

    def plan(self, _size: GraphSize, _starts: Sequence[int], _lengths: Sequence[int]) -> None:
        """Plans nothing."""
