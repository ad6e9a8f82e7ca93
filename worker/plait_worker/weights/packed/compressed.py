"""compressed-tensors' ``pack-quantized`` layout: integers of 4 or 8 bits, inputs packed in words, zeros by outputs.

Layers may differ in their scheme: a matrix has the one that its tensors' shapes fit.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from plait_proto.quantisation import NOTHING_IGNORED, IgnoredModules, IntegerScheme
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed import layout
from plait_worker.weights.packed.integers import ScaledIntegers, unpack
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

_INTEGERS = ("I64", "I32")
_INT8 = ("I8",)


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """``PackedLayout`` of compressed-tensors."""

    schemes: tuple[IntegerScheme, ...]
    """Without act-order: the tensors of a matrix tell."""
    ignored: IgnoredModules = NOTHING_IGNORED
    packed: str = ".weight_packed"
    others: tuple[str, ...] = (".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        return f"compressed-tensors, {' or '.join(_title(scheme) for scheme in self.schemes)}"

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        sides = layout.read_fitting(stored, f"{module}.weight_shape", (2,), _INTEGERS)
        num_outputs, num_inputs = (int(side) for side in sides)
        found = layout.sides(stored, module + self.packed)
        if found[0] != num_outputs or not 0 < num_inputs <= found[1] * 8:
            raise ModelFilesError(
                f"tensor {module}{self.packed} has shape {list(found)}, but {module}.weight_shape says "
                f"{[num_outputs, num_inputs]}: the files do not belong together; download the model again"
            )
        return num_outputs, num_inputs

    def block_kind(self, stored: StoredTensors, module: str) -> str | None:
        """See ``PackedLayout``."""
        if stored.holds(f"{module}.weight_g_idx"):
            return None
        num_inputs, scheme = self.shape(stored, module)[1], self._scheme(stored, module)
        return layout.blocks_for(scheme, num_inputs)

    def int4_form(self, stored: StoredTensors, module: str) -> Int4Form | None:
        """See ``PackedLayout``."""
        scheme, is_mixed = self._scheme(stored, module), stored.holds(f"{module}.weight_g_idx")
        return layout.int4_form(scheme, is_mixed=is_mixed)

    def has_half_scales(self, stored: StoredTensors, module: str) -> bool:
        """See ``PackedLayout``."""
        return layout.are_halves(stored, f"{module}.weight_scale")

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """See ``PackedLayout``."""
        num_outputs, num_inputs = self.shape(stored, module)
        scheme = self._scheme(stored, module)
        groups = layout.num_groups(module, num_inputs, scheme.group_size)
        scale_OG = layout.read_scales(stored, f"{module}.weight_scale", (num_outputs, groups))
        words = stored.read_as_stored(module + self.packed, layout.INT32)
        order_name = f"{module}.weight_g_idx"
        return ScaledIntegers(
            unpack(words, scheme.bits)[:, :num_inputs],
            _zeros(stored, module, scheme, (num_outputs, groups)),
            scale_OG,
            layout.read_order(stored, order_name, num_inputs, groups) if stored.holds(order_name) else None,
        )

    def check_values(self, _stored: StoredTensors, _modules: Sequence[str]) -> None:
        """See ``PackedLayout``; there is one version of zeros."""

    def _scheme(self, stored: StoredTensors, module: str) -> IntegerScheme:
        """The one whose words, zeros and scales these are."""
        scale_name = f"{module}.weight_scale"
        if not stored.holds(scale_name):
            raise ModelFilesError(f"the model files lack the tensor {scale_name}: download them again")
        num_inputs, num_words = self.shape(stored, module)[1], layout.sides(stored, module + self.packed)[1]
        fitting = [
            scheme
            for scheme in self.schemes
            if num_words == -(-num_inputs * scheme.bits // layout.WORD_BITS)
            and scheme.is_symmetric != stored.holds(f"{module}.weight_zero_point")
        ]
        if not fitting:
            raise ModelFilesError(
                f"tensor {module}{self.packed} has {num_words} words for {num_inputs} inputs "
                f"{'with' if stored.holds(f'{module}.weight_zero_point') else 'without'} zeros, which is none of what "
                f"quantization_config says ({self.title}): the files do not belong together; download the model again"
            )
        groups = stored.shape(scale_name)[-1:]
        return next(
            (each for each in fitting if groups == (num_inputs // (each.group_size or num_inputs),)), fitting[0]
        )


def distinct(schemes: Iterable[IntegerScheme]) -> tuple[IntegerScheme, ...]:
    """For ``PackQuantized``."""
    return tuple(dict.fromkeys(replace(scheme, is_act_order=False) for scheme in schemes))


def _title(scheme: IntegerScheme) -> str:
    kind = "symmetric" if scheme.is_symmetric else "with zeros"
    return f"{scheme.bits} bits, {layout.groups_in_words(scheme.group_size)}, {kind}"


def _zeros(stored: StoredTensors, module: str, scheme: IntegerScheme, shape: tuple[int, int]) -> Tensor:
    """int16 ``[O, G]``; stored integers are signed, packed ones more by half of their range."""
    middle, name = 1 << scheme.bits - 1, f"{module}.weight_zero_point"
    if scheme.is_symmetric:
        return torch.full(shape, middle, dtype=torch.int16)
    if stored.dtype(name) in _INT8:
        return layout.read_fitting(stored, name, shape, _INT8).to(torch.int16) + middle
    num_words = -(-shape[0] * scheme.bits // layout.WORD_BITS)
    words = layout.read_fitting(stored, name, (num_words, shape[1]))
    return unpack(words.T, scheme.bits)[:, : shape[0]].T.contiguous().to(torch.int16)
