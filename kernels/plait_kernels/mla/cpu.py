"""MLA by the compiled CPU kernels. Shapes as in ``plait_kernels.mla``; R rows, I cached tokens whose keys and values
are decompressed, V dims of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.attention.cpu import CpuRows, HeadSizes
from plait_kernels.cpu import library as cpu


@dataclass(frozen=True, slots=True)
class PagedMla:
    """The shape of attention with absorbed queries."""

    num_heads: int
    latent_dim: int
    """L: dims of a cached token that are its value."""
    cached_dim: int
    """C: even in bfloat16."""
    scale: float
    page_size: int


class AbsorbedRows(CpuRows):
    """Rows of absorbed queries: row r has ``lengths[r]`` new tokens after ``starts[r]`` of context."""

    def __init__(self, shape: PagedMla, starts: Sequence[int], lengths: Sequence[int], page_table_RW: Tensor) -> None:
        """``page_table_RW`` int32, contiguous, on the CPU, and wide enough for every row."""
        sizes = HeadSizes(shape.num_heads, 1, shape.cached_dim, shape.latent_dim, shape.scale)
        super().__init__(sizes, starts, lengths, page_table_RW, shape.page_size)

    def attend(self, q_THC: Tensor, pages: Tensor) -> Tensor:
        """Causal attention over a row's latent vectors: their weighted sums ``[T, H, L]``."""
        cpu.check_tensor(pages, q_THC.dtype, self.sizes.key_dim)
        cached = cpu.KvView(pages.data_ptr(), *pages.stride()[:2], 0)
        out_THL = torch.empty((*q_THC.shape[:2], self.sizes.value_dim), dtype=pages.dtype)
        self.attend_to(q_THC, cached, cached, out_THL)
        return out_THL


class DecompressedRows(CpuRows):
    """Rows whose keys and values are stored row after row: row r sees ``seen[r]`` tokens."""

    def __init__(self, sizes: HeadSizes, lengths: Sequence[int], seen: Sequence[int], *, is_causal: bool) -> None:
        """``is_causal``: a row sees its own tokens, each those up to itself; else all of its tokens see all."""
        firsts_R1 = torch.tensor([0, *seen[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)[:, None]
        starts = [0] * len(seen) if is_causal else seen
        # Each token is a page of its own, from which on a row's positions are counted.
        super().__init__(sizes, starts, lengths, firsts_R1, max([1, *seen]), seen)

    def attend(self, q_THE: Tensor, k_IHE: Tensor, v_IHV: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, H, V]`` in the dtype of the keys, and the log-sum-exp, float32 base 2 ``[T, H]``.

        A head's dims are contiguous in keys and values.
        """
        cpu.check_tensor(k_IHE, q_THE.dtype, self.sizes.num_heads, self.sizes.key_dim)
        cpu.check_tensor(v_IHV, q_THE.dtype, self.sizes.num_heads, self.sizes.value_dim)
        keys, values = (cpu.KvView(x.data_ptr(), x.stride(0), *x.stride()[:2]) for x in (k_IHE, v_IHV))
        out_THV = torch.empty((*q_THE.shape[:2], self.sizes.value_dim), dtype=k_IHE.dtype)
        lse_TH = torch.empty(out_THV.shape[:2])
        self.attend_to(q_THE, keys, values, out_THV, lse_TH)
        return out_THV, lse_TH


def can_attend_mla(query_dim: int, cached_dim: int, like: Tensor) -> bool:
    """Whether the kernels are there and take pages of this device and type, and heads of these widths."""
    even = like.dtype != torch.bfloat16 or (query_dim % 2 == 0 and cached_dim % 2 == 0)
    return even and cpu.supports_tensors(like)
