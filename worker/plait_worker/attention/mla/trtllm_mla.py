"""MLA by TensorRT-LLM's Blackwell kernels (trtllm-gen), as flashinfer packs them.

Absorbed rows read lengths and tables on the device. Decompressed rows attend to their new tokens, then to chunks of
their cached context, up-projected by kv_b_proj; the partial results are merged by LSE. The kernels were not run on our
hardware: the tests check the calls against a stand-in with the same contract (tests/plait_testing/trtllm_gen).

Shapes: P decompressed tokens, I cached tokens of a chunk, A absorbed tokens in B rows, H heads, E elements of a query
and key, V in a value, C elements cached of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from flashinfer.prefill import trtllm_ragged_attention_deepseek
from plait_kernels.attention import merge_into
from plait_kernels.kv_cache import FP8, to_cache_dtype
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.device_metadata import DeviceMetadata, Ragged, build_device_metadata
from plait_worker.attention.lengths import token_slot_mapping
from plait_worker.attention.mla.cached_context import load_latents
from plait_worker.attention.mla.ragged_calls import Run, runs_of_context, runs_of_new_tokens
from plait_worker.attention.mla.short_extend import short_extends_last
from plait_worker.attention.spec import MlaShape
from plait_worker.attention.trtllm_workspace import Scratch
from plait_worker.rows import Rows
from plait_worker.transfer import upload

PAGE_SIZES = (32, 64)
LATENTS = ((512, 64), (256, 64))
"""kv_lora_rank and rope dims."""
HEADS = ((192, 128), (128, 128), (256, 256))
"""Dims of queries and keys, and of values, of the decompressed kernel."""
SHORT_EXTEND = 64
"""New tokens up to which a row is absorbed.

Computed, not measured: absorbed scores and sums cost 3.4 times the work, but there is no up-projection. With a
kv_lora_rank of 512 both ways cost the same at 170 new tokens over a long context.
"""


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """One call of the decompressed kernel, with its lengths on the device."""

    run: Run
    ends_q: Tensor
    """int32 ``[R + 1]``."""
    ends_kv: Tensor
    """int32 ``[R + 1]``."""
    kv_lengths: Tensor
    """int32 ``[R]``."""
    slot_mapping_I: Tensor | None
    """int64: indices of the cached tokens that are seen; None for the rows' new tokens."""


@dataclass(frozen=True, slots=True)
class Group:
    """Decompressed rows that attend together: to their new tokens, then to each chunk of their contexts."""

    new: RaggedCall
    chunks: list[RaggedCall]


@dataclass(frozen=True, slots=True)
class TrtllmMlaStep:
    """``MlaStep`` of this backend."""

    backend: TrtllmMla
    num_prefill_tokens: int
    slot_mapping_T: Tensor
    order_T: Tensor | None
    groups: list[Group]
    absorbed: list[DeviceMetadata]

    @property
    def cached_scale(self) -> float:
        """See ``MlaShape``."""
        return self.backend.shape.cached_scale

    @property
    def decode_waits(self) -> bool:
        """See ``MlaStep``."""
        return False

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """See ``MlaStep``."""
        k_PHE, v_PHV = kv_b_proj(latent_PC)
        for group in self.groups:
            own = group.new.run.tokens
            out, lse = self.backend.ragged(group.new, q_PHE[own], k_PHE[own], v_PHV[own], is_causal=True)
            if group.chunks:
                out = self._with_context(group, q_PHE, out.float(), lse, pages, kv_b_proj)
            out_PHV[own] = out

    def _with_context(
        self, group: Group, q_PHE: Tensor, out: Tensor, lse: Tensor, pages: Tensor, kv_b_proj: KvBProj
    ) -> Tensor:
        """The group's output ``[tokens, H, V]``, float32, merged with that over its chunks."""
        first = group.new.run.tokens.start
        for chunk in group.chunks:
            assert chunk.slot_mapping_I is not None
            k_IHE, v_IHV = kv_b_proj(load_latents(pages, chunk.slot_mapping_I, self.backend.shape))
            part, part_lse = self.backend.ragged(chunk, q_PHE[chunk.run.tokens], k_IHE, v_IHV, is_causal=False)
            own = slice(chunk.run.tokens.start - first, chunk.run.tokens.stop - first)
            merge_into(out[own], lse[own], part, part_lse)
        return out

    def decode(self, q_AHC: Tensor, pages: Tensor) -> Tensor:
        """See ``MlaStep``."""
        out_AHL = torch.empty(*q_AHC.shape[:2], self.backend.shape.latent_dim, dtype=q_AHC.dtype, device=q_AHC.device)
        first = 0
        for rows in self.absorbed:
            tokens = slice(first, first + rows.num_tokens)
            self.backend.absorbed(rows, q_AHC[tokens], pages, out_AHL[tokens])
            first = tokens.stop
        return out_AHL


class TrtllmMla:
    """``AttentionBackend`` of ``MlaStep`` for compute capabilities 10.0 and 10.3."""

    name = "trtllm_mla"
    is_capturable = True
    captured_prefill = None
    short_extend = SHORT_EXTEND

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape = shape = requirements.spec
        self.page_size = requirements.page_size
        self.mla_context_chunk_size = requirements.mla_context_chunk_size
        self.scratch = Scratch.of(shape.num_heads, shape.latent_dim, requirements.max_tokens, requirements.device)

    def prepare(self, rows: Rows) -> TrtllmMlaStep:
        """Order of the rows, lengths and tables."""
        ordered = short_extends_last(rows, lambda _start, length: length <= self.short_extend)
        rows, first, num_tokens = ordered.rows, ordered.num_decompressed, ordered.num_decompressed_tokens
        extends = build_device_metadata(rows, range(first, rows.num_prefill), num_tokens)
        decoded = build_device_metadata(rows, range(rows.num_prefill, rows.num_rows), rows.num_prefill_tokens)
        return TrtllmMlaStep(
            backend=self,
            num_prefill_tokens=num_tokens,
            slot_mapping_T=token_slot_mapping(rows, self.page_size),
            order_T=ordered.order_T,
            groups=list(self._groups(rows, first)),
            absorbed=[part for part in (extends, decoded) if part is not None],
        )

    def _groups(self, rows: Rows, num_decompressed: int) -> Iterator[Group]:
        starts, lengths = rows.starts[:num_decompressed], rows.lengths[:num_decompressed]
        for run in runs_of_new_tokens(lengths, self._fits):
            chunks = runs_of_context(run, starts, lengths, self.mla_context_chunk_size)
            yield Group(self._build_ragged_call(run, rows), [self._build_ragged_call(chunk, rows) for chunk in chunks])

    def _fits(self, num_rows: int, longest: int) -> bool:
        return self.scratch.has_room_for_statistics(self.shape.num_heads, num_rows, longest)

    def _build_ragged_call(self, run: Run, rows: Rows) -> RaggedCall:
        """The run with its lengths on the device."""
        num_rows, kv_lengths = len(run.rows), run.kv_lengths
        ends_q, ends_kv = np.cumsum([0, *run.q_lengths]), np.cumsum([0, *kv_lengths])
        packed = np.concatenate((ends_q, ends_kv, kv_lengths)).astype(np.int32)
        on_q, on_kv, lengths = upload(packed, self.scratch.workspace.device).split(
            [num_rows + 1, num_rows + 1, num_rows]
        )
        slot_mapping_I = None if run.seen is None else run.seen.slot_mapping(rows.page_table_RW, self.page_size)
        return RaggedCall(run, on_q, on_kv, lengths, slot_mapping_I)

    def ragged(self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Decompressed attention: ``[tokens, H, V]`` and its LSE, float32 base 2 ``[tokens, H]``.

        A row that sees nothing gets 0 and -inf.
        """
        run = call.run
        # The kernel leaves stale output for rows that see nothing; flashinfer removes them if it has the host lengths.
        kv_lengths = run.kv_lengths
        has_empty = 0 in kv_lengths
        out, lse = trtllm_ragged_attention_deepseek(
            q.contiguous(),  # the launcher takes no strides of the queries
            k,
            v,
            self.scratch.workspace,
            call.kv_lengths,
            max(run.q_lengths),
            max(kv_lengths),
            self.shape.scale,
            1.0,
            -1.0,
            len(run.rows),
            -1,
            call.ends_q,
            call.ends_kv,
            None,
            is_causal,
            True,
            q_seq_lens_cpu=torch.tensor(run.q_lengths, dtype=torch.int32) if has_empty else None,
            kv_seq_lens_cpu=torch.tensor(kv_lengths, dtype=torch.int32) if has_empty else None,
        )
        return out, lse

    def absorbed(self, rows: DeviceMetadata, q_AHC: Tensor, pages: Tensor, out_AHL: Tensor) -> None:
        """Absorbed attention over the pages, written to ``out_AHL``."""
        shape, queries = self.shape, rows.queries
        # Queries have the pages' type. bmm1_scale is softmax scale times key scale, bmm2_scale the value scale.
        q_AHC = to_cache_dtype(q_AHC, shape.cached_dtype, 1.0)
        if isinstance(queries, int):
            by_row = (rows.num_rows, queries)
            q_AHC, out_AHL = q_AHC.unflatten(0, by_row), out_AHL.unflatten(0, by_row)
        trtllm_batch_decode_with_kv_cache_mla(
            q_AHC,
            pages,
            self.scratch.workspace,
            shape.query_dim - (shape.cached_dim - shape.latent_dim),
            shape.latent_dim,
            shape.cached_dim - shape.latent_dim,
            rows.table_BW,
            rows.lengths_B,
            rows.table_BW.shape[1] * self.page_size,
            out=out_AHL,
            bmm1_scale=shape.scale * shape.cached_scale,
            bmm2_scale=shape.cached_scale,
            backend="trtllm-gen",
            cum_seq_lens_q=queries.ends if isinstance(queries, Ragged) else None,
            max_q_len=queries.max_queries if isinstance(queries, Ragged) else None,
            multi_ctas_kv_counter_buffer=self.scratch.counters,
        )

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        shape, page_size = requirements.spec, requirements.page_size
        latent = (shape.latent_dim, shape.cached_dim - shape.latent_dim)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"its kernels take pages of 32 or 64 tokens, not {page_size}; set --page-size 64")
        if latent not in LATENTS:
            raise ValueError(
                "its kernels take a kv_lora_rank of 512 or 256 with 64 rope dims, "
                f"not {latent[0]} with {latent[1]}; use torch"
            )
        if shape.num_heads > 64 and shape.num_heads != 128:
            raise ValueError(f"its kernels take up to 64 heads on a rank, or 128, not {shape.num_heads}; change --tp")
        if shape.dtype is not torch.bfloat16 or shape.cached_dtype not in (torch.bfloat16, FP8):
            raise ValueError("its kernels take bfloat16 with a cache of bfloat16 or float8; set --dtype bfloat16")
        TrtllmMla.validate_kv_b_proj(shape)

    @staticmethod
    def validate_kv_b_proj(shape: MlaShape) -> None:
        """Raise ``ValueError`` with the rule that the un-absorbed kernel would break."""
        if (shape.query_dim, shape.value_dim) not in HEADS:
            raise ValueError(
                "its kernels take 192 query dims with 128 value dims, 128 with 128, or 256 with 256, "
                f"not {shape.query_dim} with {shape.value_dim}; use torch"
            )
