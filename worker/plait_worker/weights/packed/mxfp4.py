"""compressed-tensors' ``mxfp4-pack-quantized`` layout: two e2m1 values a byte, and an e8m0 scale for 32 inputs.

Twice an e2m1 value is an integer of at most 12, so that Q5_0 blocks with half the scale hold a matrix exactly.

Shapes: O outputs, I inputs, G groups, R outputs of a slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.fields import Fields
from plait_worker.weights.packed import layout
from plait_worker.weights.packed.integers import BLOCK, FLOAT_MIDDLE, FLOATS, ScaledIntegers, unpack_nibbles
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

FORMAT = "mxfp4-pack-quantized"
_BYTES = ("U8", "I8")
_EXPONENTS = ("U8", "F8_E8M0")
_QUANTS = (FLOATS + FLOAT_MIDDLE).to(torch.uint8)
"""By the four bits."""
_ROWS = 256
"""Looked up at a time: indices take eight times the result."""
_ZERO_EXPONENT = 128
"""Of a stored scale of 2, whose half is 2 ** 0."""
_HALF_EXPONENTS = range(_ZERO_EXPONENT - 24, _ZERO_EXPONENT + 16)
"""Stored scales whose halves are float16 numbers."""
_NO_NUMBER = 255


@dataclass(frozen=True, slots=True)
class PackedMxfp4:
    """``PackedLayout`` of MXFP4."""

    ignored: tuple[str, ...]
    packed: str = ".weight_packed"
    others: tuple[str, ...] = (".weight_scale",)

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        return "compressed-tensors, MXFP4"

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        num_outputs, num_bytes = layout.sides(stored, module + self.packed)
        return num_outputs, 2 * num_bytes

    def block_kind(self, _stored: StoredTensors, _module: str) -> str | None:
        """See ``PackedLayout``."""
        return "Q5_0"

    def has_half_scales(self, stored: StoredTensors, module: str) -> bool:
        """See ``PackedLayout``."""
        exponent_OG = self._exponents(stored, module)
        return int(exponent_OG.min()) in _HALF_EXPONENTS and int(exponent_OG.max()) in _HALF_EXPONENTS

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """See ``PackedLayout``."""
        exponent_OG = self._exponents(stored, module)
        if bool((exponent_OG == _NO_NUMBER).any()):
            raise ModelFilesError(
                f"tensor {module}.weight_scale holds a scale that is no number: download the model again"
            )
        bytes_OX = stored.read_as_stored(module + self.packed, _BYTES)
        quant_OI = torch.cat([_looked_up(bytes_RX) for bytes_RX in bytes_OX.split(_ROWS)])
        zero_OG = torch.full(exponent_OG.shape, FLOAT_MIDDLE, dtype=torch.int16)
        scale_OG = _powers_of_two(exponent_OG.long() - _ZERO_EXPONENT)
        return ScaledIntegers(quant_OI, zero_OG, scale_OG, is_float=True)

    @property
    def int4_form_of_all(self) -> Int4Form:
        """``int4_form``, which all matrices have."""
        return Int4Form(BLOCK, has_zero=False, is_float=True)

    def int4_form(self, _stored: StoredTensors, _module: str) -> Int4Form:
        """See ``PackedLayout``."""
        return self.int4_form_of_all

    def check_values(self, _stored: StoredTensors, _modules: Sequence[str]) -> None:
        """See ``PackedLayout``; there are no zeros."""

    def _exponents(self, stored: StoredTensors, module: str) -> Tensor:
        """uint8 ``[O, G]``."""
        num_outputs, num_inputs = self.shape(stored, module)
        groups = layout.num_groups(module, num_inputs, BLOCK)
        return layout.read_fitting(stored, f"{module}.weight_scale", (num_outputs, groups), _EXPONENTS).view(
            torch.uint8
        )


def read_mxfp4(stated: Fields) -> PackedMxfp4:
    """What ``quantization_config`` says; raises ``ModelFilesError`` for a variant that is not read.

    Activations are not rounded, whatever it says of them.
    """
    groups = stated.nested("config_groups")
    for name in groups.values:
        weights = groups.nested(name).nested("weights")
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 0, 0)
        size = weights.integer("group_size", BLOCK)
        if (kind, bits, size) != ("float", 4, BLOCK) or not weights.boolean("symmetric", True):
            raise layout.not_supported(stated, f"{FORMAT} of {bits}-bit {kind} weights in groups of {size}")
    return PackedMxfp4(tuple(stated.texts("ignore")))


def _looked_up(bytes_RX: Tensor) -> Tensor:
    """uint8 ``[R, 2 X]``; the low four bits of a byte come first."""
    return _QUANTS[unpack_nibbles(bytes_RX.view(torch.uint8)).long()]


def _powers_of_two(exponent: Tensor) -> Tensor:
    """float32, from int64; by the bits of float64, which no library rounds."""
    return (exponent + 1023 << 52).view(torch.float64).float()
