"""MHA by the compiled CPU kernels, which read the pages in place.

Shapes as in ``plait_worker.attention.backend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from plait_kernels.attention.paged_cpu import PagedHeads, PagedRows, can_attend
from plait_kernels.kv_cache import PageScales
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MhaShape
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class CpuMhaStep:
    """``StepAttention`` of the compiled kernels."""

    rows: PagedRows

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, _scales: PageScales) -> Tensor:
        """See ``StepAttention``; its pages are not scaled."""
        self.rows.store(k_TGD, v_TGD, pages)
        return self.rows.attend(q_THD, pages)


class CpuMha:
    """``AttentionBackend`` for CPUs, in bfloat16 and float32."""

    name = "cpu"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        shape, page_size = requirements.spec, requirements.page_size
        self.heads = PagedHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale, page_size)

    @staticmethod
    def supports(shape: MhaShape) -> bool:
        """Whether the kernels are built and support the shape."""
        like = torch.empty(0, dtype=shape.cached_dtype)
        return shape.window is None and can_attend(shape.num_heads, shape.num_kv_heads, shape.head_dim, like)

    def prepare(self, rows: Rows) -> CpuMhaStep:
        """The rows in the kernels' form."""
        return CpuMhaStep(PagedRows(self.heads, rows.starts, rows.lengths, rows.page_table_RW))
