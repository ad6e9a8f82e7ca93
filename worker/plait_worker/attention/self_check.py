"""A problem on which an attention backend is checked against the torch backend, and timed.

Shapes as in ``plait_worker.attention``; O numbers of a head that rope does not turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from plait_kernels.latent import CacheTarget, keep_latents
from torch import Tensor

from plait_worker.attention.backend import AttentionBackend, MlaStep
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.registry import BackendRequirements
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.rows import Rows

_DECODE_ROWS = 64
_PAGES_PER_ROW = 16
_NUM_PAGES = _DECODE_ROWS * _PAGES_PER_ROW
_REPEATS = 20


class SelfCheck(ABC):
    """One layer's cache with random contents, rows that decode over it, rows that prefill, and short ones that do."""

    def __init__(self, requirements: BackendRequirements, reference: AttentionBackend[Any]) -> None:
        """Rows of up to 16 scattered pages."""
        self.device, self.dtype = requirements.device, requirements.shape.dtype
        self.reference = reference
        context = _PAGES_PER_ROW * requirements.page_size
        starts = [context - 1 - row * requirements.page_size // 5 for row in range(_DECODE_ROWS)]
        self.decode = self._rows(0, starts, [1] * _DECODE_ROWS)
        self.prefill = self._rows(4, [0, context // 2, 7, 0], [context, context // 2, context // 4, 1])
        # Such as latent attention absorbs; of the smallest pages, as many as there is room for.
        half, rest = context // 2, context - context // 4
        self.extends = self._rows(4, [0, 7, half, context // 4], [1, 2, min(40, half), min(60, rest)])

    @staticmethod
    def num_tokens(page_size: int) -> int:
        """Tokens of its largest step, or a few more."""
        return 2 * _PAGES_PER_ROW * page_size + _DECODE_ROWS

    @abstractmethod
    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        """The step of these rows, with the same numbers for every backend."""

    def error(self, backend: AttentionBackend[Any], rows: Rows) -> float:
        """Largest difference from the reference, over the reference's largest value; NaN where there is one."""
        given = self._attend(backend, rows)().double()
        right = self._attend(self.reference, rows)().double()
        return float((given - right).abs().max() / right.abs().max())

    def us(self, backend: AttentionBackend[Any], rows: Rows) -> float:
        """Microseconds of the device for one layer, without what the host needs to launch it."""
        run = self._attend(backend, rows)
        run()  # what is made once a step is no layer's time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_REPEATS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / _REPEATS * 1000

    def _random(self, *size: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(*size, dtype=self.dtype, device=self.device, generator=generator)

    def _rows(self, num_prefill: int, starts: list[int], lengths: list[int]) -> Rows:
        scattered = torch.randperm(_NUM_PAGES, device=self.device)[: _PAGES_PER_ROW * len(starts)]
        positions = [torch.arange(s, s + n, device=self.device) for s, n in zip(starts, lengths, strict=True)]
        return Rows(
            num_prefill=num_prefill,
            slots=list(range(len(starts))),
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64, device=self.device),
            positions_T=torch.cat(positions),
            page_table_RW=scattered.view(-1, _PAGES_PER_ROW).to(torch.int32),
            sample_index_S=torch.zeros(0, dtype=torch.int64, device=self.device),
        )


class MhaSelfCheck(SelfCheck):
    """Of heads that cache keys and values."""

    def __init__(self, requirements: BackendRequirements, shape: MhaShape) -> None:
        """``shape`` is the need's."""
        super().__init__(requirements, TorchMha(shape, requirements.page_size))
        self.shape = shape
        self.pages = self._random(_NUM_PAGES + 1, 2, shape.num_kv_heads, requirements.page_size, shape.head_dim).to(
            shape.cached_dtype
        )

    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        q_THD, k_TGD, v_TGD = (
            self._random(rows.num_tokens, num_heads, self.shape.head_dim, generator=generator)
            for num_heads in (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        )
        step = backend.prepare(rows)
        return lambda: step.forward(q_THD, k_TGD, v_TGD, self.pages)


class MlaSelfCheck(SelfCheck):
    """Of latent attention, between its projections."""

    def __init__(self, requirements: BackendRequirements, shape: MlaShape) -> None:
        """``shape`` is the need's."""
        super().__init__(
            requirements,
            TorchMla(shape, requirements.page_size, requirements.mla_context_chunk_size, requirements.device),
        )
        self.shape = shape
        self.pages = self._random(_NUM_PAGES + 1, requirements.page_size, shape.cached_dim).to(shape.cached_dtype)
        self.still_dim = shape.query_dim - (shape.cached_dim - shape.latent_dim)
        size = shape.latent_dim**-0.5
        self.key_HOL = self._random(shape.num_heads, self.still_dim, shape.latent_dim) * size
        self.value_HVL = self._random(shape.num_heads, shape.value_dim, shape.latent_dim) * size

    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        q_THE = self._random(rows.num_tokens, self.shape.num_heads, self.shape.query_dim, generator=generator)
        latent_TC = self._random(rows.num_tokens, self.shape.cached_dim, generator=generator)
        step: MlaStep = backend.prepare(rows)
        if (order_T := step.order_T) is None:
            return lambda: self._layer(step, q_THE, latent_TC)
        inverse_T = order_T.argsort()
        return lambda: self._layer(step, q_THE[order_T], latent_TC[order_T])[inverse_T]

    def _layer(self, step: MlaStep, q_THE: Tensor, latent_TC: Tensor) -> Tensor:
        """``[T, H, V]``, in the step's own order."""
        num = step.num_prefill_tokens
        out_THV = q_THE.new_empty(*q_THE.shape[:2], self.shape.value_dim)
        keep_latents(latent_TC, CacheTarget(self.pages, step.slot_mapping_T, step.cached_scale))
        if num > 0:
            step.prefill(q_THE[:num], latent_TC[:num], self.pages, self._kv_b_proj, out_THV[:num])
        if num < len(q_THE):
            out_BHL = step.decode(self._absorb(q_THE[num:]), self.pages)
            out_THV[num:] = torch.einsum("bhl,hvl->bhv", out_BHL, self.value_HVL)
        return out_THV

    def _kv_b_proj(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Parts of one tensor, as the models' one product gives them."""
        latent_NL, key_NR = latent_NC.split([self.shape.latent_dim, latent_NC.shape[1] - self.shape.latent_dim], dim=1)
        key_NHO = torch.einsum("nl,hol->nho", latent_NL, self.key_HOL)
        shared_NHR = key_NR[:, None].expand(-1, key_NHO.shape[1], -1)
        both = torch.cat((key_NHO, shared_NHR, torch.einsum("nl,hvl->nhv", latent_NL, self.value_HVL)), dim=2)
        return both[..., : self.shape.query_dim], both[..., self.shape.query_dim :]

    def _absorb(self, q_BHE: Tensor) -> Tensor:
        still_BHO, turned_BHR = q_BHE.split([self.still_dim, q_BHE.shape[2] - self.still_dim], dim=2)
        return torch.cat((torch.einsum("bho,hol->bhl", still_BHO, self.key_HOL), turned_BHR), dim=2)


def self_check(requirements: BackendRequirements) -> SelfCheck:
    """The problem of the need's kind of attention."""
    if isinstance(requirements.shape, MlaShape):
        return MlaSelfCheck(requirements, requirements.shape)
    return MhaSelfCheck(requirements, requirements.shape)
