"""The rows of one step, as the models and the attention backends see them.

Shapes: T tokens of the step, R rows, P prefill rows, S rows that sample, I cached tokens, W pages in the widest
row's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Cached tokens of a captured step's prefill rows, row by row, on the device."""

    row_I: Tensor
    """int64, padded with the row that is never used."""
    position_I: Tensor
    """int64, in the row's request."""


@dataclass(frozen=True, slots=True)
class DeviceLengths:
    """Of P prefill rows, on the device; the two bounds are on the host."""

    ends_q: Tensor
    """int32 ``[P + 1]``: new tokens before each row."""
    ends_kv: Tensor
    """int32 ``[P + 1]``: positions before each row."""
    kv_P: Tensor
    """int32 ``[P]``: positions that each row's last token sees."""
    row_T: Tensor
    """int64: row of each token of the step, decode rows included."""
    max_q: int
    """Upper bound of a row's new tokens."""
    max_kv: int
    """Upper bound of a row's positions."""
    context: DeviceContext | None = None
    """Set if the prefill rows' attention is planned before each replay."""


@dataclass(frozen=True, slots=True)
class Save:
    """The slot state of a row behind a position, to be kept."""

    row: int
    position: int
    """A page boundary behind the row's first token, up to its end."""
    snapshot: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in batch order ``[prefill | decode]``; their tokens are concatenated.

    The lists live on the host and have one entry a row. A decode row is a row of length 1.
    """

    num_prefill: int
    """Prefill rows; the others decode."""
    slots: list[int]
    """Slot of each row."""
    starts: list[int]
    """Position of each row's first token; earlier tokens are in the cache."""
    lengths: list[int]
    """Tokens of each row in this step, at least 1."""
    token_ids_T: Tensor
    """int64 ``[T]``."""
    positions_T: Tensor
    """int64 ``[T]``, the position of each token in its request."""
    page_table_RW: Tensor
    """int32 ``[R, W]``, padded with the dummy page; W is a multiple of 4 and covers ``start + length``."""
    sample_index_S: Tensor
    """int64 ``[S]``: index in T of the last token of each row that samples."""
    saves: Sequence[Save] = ()
    """Of models with slot state."""
    device_lengths: DeviceLengths | None = None
    """Set for rows of a graph: lengths change with each replay, and the host's lists are upper bounds."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids_T.shape[0]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill rows: the first ones of T."""
        return sum(self.lengths[: self.num_prefill])
