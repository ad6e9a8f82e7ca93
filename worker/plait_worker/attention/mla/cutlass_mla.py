"""MLA decode rows by CUTLASS's Blackwell kernel, as flashinfer packs it; prefill as in trtllm_mla.

The kernel takes one query a row and 128 heads, and returns no LSE. DeepSeek-V3's softmax scale without YaRN is built
in. It was not run on our hardware: the tests check the call against a stand-in with the same contract.

Shapes: A decode rows, H heads, C elements cached of a token.
"""

from __future__ import annotations

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.device_metadata import DeviceMetadata
from plait_worker.attention.mla.trtllm_mla import TrtllmMla
from plait_worker.attention.spec import MlaShape
from plait_worker.errors import ensure

NUM_HEADS = 128
LATENT = (512, 64)
SCALE = 192**-0.5
# The kernel takes divisors of 128. Tables have a multiple of four pages and must cover a multiple of 128 tokens.
PAGE_SIZES = (32, 64, 128)


class CutlassMla(TrtllmMla):
    """``AttentionBackend`` of ``MlaStep`` for compute capabilities 10.0 and 10.3."""

    name = "cutlass_mla"
    short_extend = 0

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        super().__init__(requirements)
        # No plan, which would need host lengths: each call passes the device's.
        self._kernel = BatchMLAPagedAttentionWrapper(torch.zeros_like(self.scratch.workspace), backend="cutlass")

    def absorbed(self, rows: DeviceMetadata, q_AHC: Tensor, pages: Tensor, out_AHL: Tensor) -> None:
        """Absorbed attention over the pages, written to ``out_AHL``."""
        ensure(rows.queries == 1, "cutlass_mla takes one query token a decode row")
        scaled_AHC = q_AHC if self.shape.scale == SCALE else q_AHC * (self.shape.scale / SCALE)
        self._kernel.run(
            query=scaled_AHC.contiguous(),
            kv_cache=pages,
            out=out_AHL,
            kv_len=rows.lengths_B,
            page_table=rows.table_BW,
        )

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """See ``TrtllmMla``."""
        shape, page_size = requirements.spec, requirements.page_size
        if page_size not in PAGE_SIZES:
            raise ValueError(f"its kernel takes pages of 32, 64 or 128 tokens, not {page_size}; set --page-size 128")
        if shape.num_heads != NUM_HEADS:
            raise ValueError(f"its kernel takes 128 heads on a rank, not {shape.num_heads}; use trtllm_mla")
        if (shape.latent_dim, shape.cached_dim - shape.latent_dim) != LATENT:
            raise ValueError("its kernel takes a kv_lora_rank of 512 with 64 rope dims; use torch")
        if shape.dtype is not torch.bfloat16 or shape.cached_dtype is not torch.bfloat16:
            raise ValueError("it takes bfloat16 with a cache of bfloat16; set --dtype bfloat16, --kv-cache-dtype auto")
        TrtllmMla.validate_kv_b_proj(shape)
