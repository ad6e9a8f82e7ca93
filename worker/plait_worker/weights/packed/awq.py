"""AWQ's layout (arXiv 2306.00978, AutoAWQ's version ``gemm``): 4-bit integers, eight neighbouring outputs a word.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.weights.fields import Fields
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

    group_size: int | None
    ignored: tuple[str, ...]
    packed: str = ".qweight"
    others: tuple[str, ...] = (".qzeros", ".scales")

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        return f"AWQ, 4 bits, {layout.groups_in_words(self.group_size)}"

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        num_inputs, num_words = layout.sides(stored, module + self.packed)
        return num_words * _PER_WORD, num_inputs

    def block_kind(self, stored: StoredTensors, module: str) -> str | None:
        """See ``PackedLayout``."""
        return layout.blocks_for(_BITS, self.shape(stored, module)[1], self.group_size, is_symmetric=False)

    @property
    def int4_form_of_all(self) -> Int4Form:
        """``int4_form``, which all matrices have."""
        return Int4Form(self.group_size, has_zero=True)

    def int4_form(self, _stored: StoredTensors, _module: str) -> Int4Form:
        """See ``PackedLayout``."""
        return self.int4_form_of_all

    def has_half_scales(self, stored: StoredTensors, module: str) -> bool:
        """See ``PackedLayout``."""
        return layout.are_halves(stored, f"{module}.scales")

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """See ``PackedLayout``."""
        num_outputs, num_inputs = self.shape(stored, module)
        groups = layout.num_groups(module, num_inputs, self.group_size)
        zeros = layout.read_fitting(stored, f"{module}.qzeros", (groups, num_outputs // _PER_WORD))
        scale_GO = layout.read_scales(stored, f"{module}.scales", (groups, num_outputs))
        words = stored.read_as_stored(module + self.packed, layout.INT32)
        return ScaledIntegers(_outputs_first(words), _outputs_first(zeros).to(torch.int16), scale_GO.T.contiguous())

    def check_values(self, _stored: StoredTensors, _modules: Sequence[str]) -> None:
        """See ``PackedLayout``; there is one version of zeros."""


def read_awq(stated: Fields) -> Awq:
    """What ``quantization_config`` says; raises ``ModelFilesError`` for a variant that is not read."""
    version = stated.text("version", "gemm")
    bits = stated.integer("w_bit" if stated.has("w_bit") else "bits", low=0)
    if version.lower() != "gemm" or bits != _BITS:
        raise layout.not_supported(stated, f"awq of version {version[:20]} with {bits} bits")
    if not stated.boolean("zero_point", True):
        raise layout.not_supported(stated, "awq with zero_point false")
    size = "q_group_size" if stated.has("q_group_size") else "group_size"
    return Awq(layout.read_group_size(stated, size), tuple(stated.texts("modules_to_not_convert")))


def _outputs_first(words: Tensor) -> Tensor:
    """uint8 ``[O, X]`` of int32 ``[X, O / 8]``."""
    stored: Tensor = unpack(words, _BITS).unflatten(1, (-1, _PER_WORD))[..., _PLACES]
    return stored.flatten(1).T.contiguous()
