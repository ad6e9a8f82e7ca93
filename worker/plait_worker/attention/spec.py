"""What the attention of a layer is: its kind, its sizes on this rank, and the type of its cache.

Shapes: H query heads and G key-value heads of this rank, D elements of a head; in MLA C elements cached of a token,
E in its queries and keys, V in its values; P tokens in a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from plait_kernels.kv_cache import FP8, UNSCALED, PageScales


class AttentionSpec(Protocol):
    """The attention of one layer; hashable, and equal specs share a backend."""

    @property
    def kind(self) -> str:
        """Its key in ``registry.KINDS``."""
        ...

    @property
    def description(self) -> str:
        """The kind in words, for errors."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, keys and values."""
        ...

    @property
    def cached_dtype(self) -> torch.dtype:
        """Of the pages."""
        ...

    @property
    def scales(self) -> PageScales:
        """Of the layer's pages."""
        ...

    @property
    def fp8_tolerance(self) -> float:
        """Largest difference that the self-check allows over float8 pages, over the largest value."""
        ...

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Of one page of one layer; ``page_size`` in tokens."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MhaShape:
    """MHA and GQA: every key-value head is cached."""

    kind: ClassVar[str] = "mha"
    description: ClassVar[str] = "attention to keys and values"
    # Some kernels round queries and the softmax's weights to float8 too, to 2**-4. An ignored scale is off by half.
    fp8_tolerance: ClassVar[float] = 0.08

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
    is_fp8: bool = False
    """Whether pages are float8_e4m3fn, not of ``dtype``."""
    window: int | None = None
    """Sliding window: how many positions a token sees, itself included; None for all."""
    scales: PageScales = field(default=UNSCALED, compare=False)
    """Of this layer's float8 pages. Not compared: calls get their layer's, and all layers share a backend."""

    @property
    def cached_dtype(self) -> torch.dtype:
        """Of the pages."""
        return FP8 if self.is_fp8 else self.dtype

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[2, G, P, D]``."""
        return 2, self.num_kv_heads, page_size, self.head_dim


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention (arXiv 2405.04434): one latent a token is cached, the same on every rank."""

    kind: ClassVar[str] = "mla"
    description: ClassVar[str] = "latent attention (DeepSeek's)"
    # As for MHA; keys are values as well, so the rounding comes to a tenth after the softmax.
    fp8_tolerance: ClassVar[float] = 0.2

    num_heads: int
    """H."""
    latent_dim: int
    """The first elements of a cached token: what its values are made from."""
    cached_dim: int
    """C: the latent, then the key that all heads share."""
    query_dim: int
    """E."""
    value_dim: int
    """V."""
    scale: float
    """Factor of the scores before the softmax."""
    dtype: torch.dtype
    """Of queries and of the step's new tokens."""
    cached_dtype: torch.dtype
    """Of the pages: ``dtype``, or float8_e4m3fn."""
    cached_scale: float = 1.0
    """Value = stored * scale; other than 1 only in float8."""

    @property
    def scales(self) -> PageScales:
        """A latent is key and value at once."""
        return PageScales(self.cached_scale, self.cached_scale)

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[P, C]``."""
        return page_size, self.cached_dim


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """DeepSeek-V4: one key, which is the value too, for all heads; recent ones raw, older ones as entries."""

    kind: ClassVar[str] = "compressed"
    description: ClassVar[str] = "compressed attention (DeepSeek-V4's)"
    fp8_tolerance: ClassVar[float] = 0.2

    num_heads: int
    """H of this rank."""
    head_dim: int
    """D."""
    window: int
    """Raw keys that a token sees, its own included."""
    ratio: int
    """Tokens of an entry; 0 in a layer without entries."""
    dtype: torch.dtype
    index_dim: int = 0
    """Elements of an entry's indexer key; 0 where all entries are seen."""
    num_index_heads: int = 0
    top_k: int = 0
    """Entries that the indexer chooses."""

    @property
    def cached_dtype(self) -> torch.dtype:
        """Of the pages and of the raw keys."""
        return self.dtype

    @property
    def scales(self) -> PageScales:
        """It has no float8 pages."""
        return UNSCALED

    @property
    def overlaps(self) -> bool:
        """Whether an entry also takes in the block before its own (CSA)."""
        return self.index_dim > 0

    @property
    def num_channels(self) -> int:
        """Channels of the running sums: of an entry's key, and of the indexer's."""
        return (self.head_dim + self.index_dim) * (2 if self.overlaps else 1)

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[P / ratio, D]``; nothing without entries.

        Raises ``ValueError`` if a page does not hold whole entries.
        """
        return self._num_entries(page_size), self.head_dim

    def index_page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[P / ratio, index_dim]``, of the indexer's keys: kernels take entries without gaps, so they lie apart."""
        return self._num_entries(page_size), self.index_dim

    def _num_entries(self, page_size: int) -> int:
        if not self.ratio:
            return 0
        if page_size % self.ratio:
            raise ValueError(f"--page-size {page_size} is not a multiple of {self.ratio}, the tokens of an entry")
        return page_size // self.ratio


def check_no_window(spec: MhaShape) -> None:
    """Raise ``ValueError`` for a sliding window, which no GPU kernel here has."""
    if spec.window is not None:
        raise ValueError(f"its kernels have no sliding window (the model's is {spec.window} tokens); take torch")


def distinct(specs: Iterable[AttentionSpec]) -> list[AttentionSpec]:
    """Each spec once, in the order of the layers."""
    return list(dict.fromkeys(specs))
