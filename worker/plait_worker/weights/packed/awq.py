"""AWQ's layout (arXiv 2306.00978, AutoAWQ's version ``gemm``): 4-bit integers, eight neighbouring outputs a word.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plait_proto.quantisation import IgnoredModules, IntegerScheme
from torch import Tensor

from plait_worker.weights.packed import layout
from plait_worker.weights.packed.integers import ScaledIntegers, unpack
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

_BITS = 4
_PER_WORD = 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where a word has each of its outputs."""


@dataclass(frozen=True, slots=True)
class Awq:
    """``PackedLayout`` of AWQ."""

    scheme: IntegerScheme
    ignored: IgnoredModules
    packed: str = ".qweight"
    others: tuple[str, ...] = (".qzeros", ".scales")

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        return f"AWQ, 4 bits, {layout.groups_in_words(self.scheme.group_size)}"

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        num_inputs, num_words = layout.sides(stored, module + self.packed)
        return num_words * _PER_WORD, num_inputs

    def block_kind(self, stored: StoredTensors, module: str) -> str | None:
        """See ``PackedLayout``."""
        return layout.blocks_for(self.scheme, self.shape(stored, module)[1])

    @property
    def int4_form_of_all(self) -> Int4Form | None:
        """``int4_form``, which all matrices have."""
        return layout.int4_form(self.scheme, is_mixed=self.scheme.mixes_groups)

    def int4_form(self, _stored: StoredTensors, _module: str) -> Int4Form | None:
        """See ``PackedLayout``."""
        return self.int4_form_of_all

    def has_half_scales(self, stored: StoredTensors, module: str) -> bool:
        """See ``PackedLayout``."""
        return layout.are_halves(stored, f"{module}.scales")

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """See ``PackedLayout``."""
        num_outputs, num_inputs = self.shape(stored, module)
        groups = layout.num_groups(module, num_inputs, self.scheme.group_size)
        scale_GO = layout.read_scales(stored, f"{module}.scales", (groups, num_outputs))
        zeros = layout.read_fitting(stored, f"{module}.qzeros", (groups, num_outputs // _PER_WORD))
        words = stored.read_as_stored(module + self.packed, layout.INT32)
        return ScaledIntegers(_outputs_first(words), _outputs_first(zeros).to(torch.int16), scale_GO.T.contiguous())

    def check_values(self, stored: StoredTensors, modules: Sequence[str]) -> None:
        """See ``PackedLayout``; there is one version of zeros."""
        for module in modules:
            num_outputs = self.shape(stored, module)[0]
            layout.check_bits(stored, module, self.title, (num_outputs // _PER_WORD, num_outputs))


def _outputs_first(words: Tensor) -> Tensor:
    """uint8 ``[O, X]`` of int32 ``[X, O / 8]``."""
    stored: Tensor = unpack(words, _BITS).unflatten(1, (-1, _PER_WORD))[..., _PLACES]
    return stored.flatten(1).T.contiguous()
