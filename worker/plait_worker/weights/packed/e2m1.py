"""Elements of 4-bit floats (OCP Microscaling Formats 1.0, e2m1), two a byte.

Twice a value is an integer of at most 12, so that a matrix is one of ``ScaledIntegers`` with scales of half the size.

Shapes: O outputs, I inputs, R outputs of a slab, X bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_worker.weights.packed import layout
from plait_worker.weights.packed.integers import FLOAT_MIDDLE, FLOATS, unpack_nibbles
from plait_worker.weights.packed.layout import StoredTensors

BYTES = ("U8", "I8")
"""What safetensors calls the types that hold two elements."""
_QUANTS = (FLOATS + FLOAT_MIDDLE).to(torch.uint8)
"""By the four bits."""
_ROWS = 256
"""Looked up at a time: indices take eight times the result."""


def shape(stored: StoredTensors, name: str) -> tuple[int, int]:
    """Outputs and inputs of a packed tensor; raises ``ModelFilesError`` if it is no matrix."""
    num_outputs, num_bytes = layout.sides(stored, name)
    return num_outputs, 2 * num_bytes


def read_quants(stored: StoredTensors, name: str) -> Tensor:
    """uint8 ``[O, I]``: twice the values, and ``FLOAT_MIDDLE``."""
    bytes_OX = stored.read_as_stored(name, BYTES)
    return torch.cat([_looked_up(bytes_RX) for bytes_RX in bytes_OX.split(_ROWS)])


def _looked_up(bytes_RX: Tensor) -> Tensor:
    """uint8 ``[R, 2 X]``; the low four bits of a byte come first."""
    return _QUANTS[unpack_nibbles(bytes_RX.view(torch.uint8)).long()]
