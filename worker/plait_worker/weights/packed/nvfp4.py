"""NVFP4: two e2m1 values a byte, an e4m3 scale for 16 inputs, and a float32 one for the matrix.

compressed-tensors divides by the matrix's scale, ModelOpt multiplies by it, and calls the bytes ``weight``. Kernels
here take no groups of 16: matrices are upcast.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plait_proto.quantisation import NVFP4_GROUP, IgnoredModules
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed import e2m1, layout
from plait_worker.weights.packed.integers import FLOAT_MIDDLE, ScaledIntegers
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

_SCALES = ("F8_E4M3",)
_WHOLE = ("F32",)


@dataclass(frozen=True, slots=True)
class PackedNvfp4:
    """``PackedLayout`` of NVFP4, in one of the two dialects."""

    title: str
    ignored: IgnoredModules
    packed: str
    whole: str
    """What follows a module's name in that of the matrix's scale."""
    unread: tuple[str, ...]
    """The same, of scales of activations: those stay as they are."""
    is_divisor: bool
    """Whether elements are divided by the matrix's scale."""

    @property
    def others(self) -> tuple[str, ...]:
        """See ``PackedLayout``."""
        return (".weight_scale", self.whole, *self.unread)

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        return e2m1.shape(stored, module + self.packed)

    def block_kind(self, _stored: StoredTensors, _module: str) -> None:
        """See ``PackedLayout``; a block has one scale for 32 inputs."""

    def has_half_scales(self, _stored: StoredTensors, _module: str) -> bool:
        """See ``PackedLayout``."""
        return False

    def int4_form(self, _stored: StoredTensors, _module: str) -> Int4Form:
        """See ``PackedLayout``."""
        return Int4Form(NVFP4_GROUP, has_zero=False, is_float=True)

    def check_values(self, _stored: StoredTensors, _modules: Sequence[str]) -> None:
        """See ``PackedLayout``; there are no zeros."""

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """See ``PackedLayout``."""
        scale_OG = self._scales(stored, module)
        zero_OG = torch.full(scale_OG.shape, FLOAT_MIDDLE, dtype=torch.int16)
        return ScaledIntegers(e2m1.read_quants(stored, module + self.packed), zero_OG, scale_OG / 2, is_float=True)

    def _scales(self, stored: StoredTensors, module: str) -> Tensor:
        """float32 ``[O, G]``, of the elements."""
        num_outputs, num_inputs = self.shape(stored, module)
        groups = layout.num_groups(module, num_inputs, NVFP4_GROUP)
        scale_OG = _read(stored, f"{module}.weight_scale", (num_outputs, groups), _SCALES)
        whole = _whole_scale(stored, module + self.whole)
        return scale_OG / whole if self.is_divisor else scale_OG * whole


def nvfp4_layout(method: str, ignored: IgnoredModules) -> PackedNvfp4:
    """Of a ``quant_method``."""
    if method == "modelopt":
        return PackedNvfp4("ModelOpt, NVFP4", ignored, ".weight", ".weight_scale_2", (), is_divisor=False)
    return PackedNvfp4(
        title=f"{method}, NVFP4",
        ignored=ignored,
        packed=".weight_packed",
        whole=".weight_global_scale",
        unread=(".input_global_scale",),
        is_divisor=True,
    )


def _whole_scale(stored: StoredTensors, name: str) -> float:
    """Files have it as a scalar or as a vector of one."""
    is_vector = stored.holds(name) and stored.shape(name) == (1,)
    whole = float(_read(stored, name, (1,) if is_vector else (), _WHOLE))
    if whole <= 0:
        raise ModelFilesError(f"tensor {name} is {whole:g}, but must be above 0: download the model again")
    return whole


def _read(stored: StoredTensors, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> Tensor:
    """float32; raises ``ModelFilesError`` unless all of them are numbers."""
    read = layout.read_fitting(stored, name, shape, types).float()
    if not torch.isfinite(read).all():
        raise ModelFilesError(f"tensor {name} holds a scale that is no number: download the model again")
    return read
