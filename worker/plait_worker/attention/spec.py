"""What a layer's attention is: its sizes on this rank, the type of its cache.

Shapes: H query heads and G key-value heads of this rank, D elements of a head; in MLA C elements cached of a token,
E in its queries and keys, V in its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales


@dataclass(frozen=True, slots=True)
class MhaShape:
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


@dataclass(frozen=True, slots=True)
class MlaShape:
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


AttentionSpec = MhaShape | MlaShape
"""Of one layer."""
