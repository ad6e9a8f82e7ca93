"""Attention: the plain form that every backend is measured against, the joining of its parts, and
decode rows over pages.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.attention import reference
from plait_kernels.attention.merge import merge
from plait_kernels.attention.reference import attend
from plait_kernels.solutions import triton_solution


def decode_paged(
    q_BHD: Tensor, pages: Tensor, table_BW: Tensor, lengths_B: Tensor, scale: float, out_BHD: Tensor
) -> None:
    """One query token a row over the row's pages: ``out_BHD`` is written.

    ``pages`` is ``[N, 2, G, P, D]``, ``table_BW`` int32 names each row's pages, ``lengths_B`` int32, at least 1, says
    how many of their tokens the row sees. Query head h reads key-value head ``h // (H / G)``.
    """
    solution = triton_solution(__name__) if q_BHD.is_cuda else reference
    solution.decode_paged(q_BHD, pages, table_BW, lengths_B, scale, out_BHD)


__all__ = ["attend", "decode_paged", "merge"]
