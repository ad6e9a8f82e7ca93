"""compressed-tensors' ``mxfp4-pack-quantized`` layout: two e2m1 values a byte, and an e8m0 scale for 32 inputs.

DeepSeek-V4's experts are so too, under other names.

Q5_0 blocks hold twice the values, with half the scales, exactly.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plait_proto.quantisation import IgnoredModules
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed import e2m1, layout
from plait_worker.weights.packed.integers import BLOCK, FLOAT_MIDDLE, ScaledIntegers
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

_EXPONENTS = ("U8", "F8_E8M0")
_ZERO_EXPONENT = 128
"""Of a stored scale of 2, whose half is 2 ** 0."""
_HALF_EXPONENTS = range(_ZERO_EXPONENT - 24, _ZERO_EXPONENT + 16)
"""Stored scales whose halves are float16 numbers."""
_NO_NUMBER = 255


@dataclass(frozen=True, slots=True)
class PackedMxfp4:
    """``PackedLayout`` of MXFP4."""

    ignored: IgnoredModules
    packed: str = ".weight_packed"
    others: tuple[str, ...] = (".weight_scale",)

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        return "compressed-tensors, MXFP4"

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        return e2m1.shape(stored, module + self.packed)

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
                f"tensor {module}{self.others[0]} holds a scale that is no number: download the model again"
            )
        quant_OI = e2m1.read_quants(stored, module + self.packed)
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
        scale = module + self.others[0]
        return layout.read_fitting(stored, scale, (num_outputs, groups), _EXPONENTS).view(torch.uint8)


def _powers_of_two(exponent: Tensor) -> Tensor:
    """float32, from int64; by the bits of float64, which no library rounds."""
    return (exponent + 1023 << 52).view(torch.float64).float()
