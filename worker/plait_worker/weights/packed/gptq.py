"""GPTQ's layout (arXiv 2210.17323, as AutoGPTQ and GPTQModel write it): 4- or 8-bit integers, inputs packed in words.

Files of ``checkpoint_format`` gptq, the first, store each zero less one; gptq_v2 stores it as it is. GPTQModel
subtracts from whole words, so a zero of 0 borrows from its neighbours; whole words give it back.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from plait_proto.quantisation import NOTHING_IGNORED, IgnoredModules, IntegerScheme
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed import layout
from plait_worker.weights.packed.integers import ScaledIntegers, unpack
from plait_worker.weights.packed.layout import Int4Form, StoredTensors

_ZERO_LESS_ONE = {"gptq": 1, "gptq_v2": 0}
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones, by bits."""
_NUM_SAMPLED = 5
"""Matrices whose zeros are checked."""
_MOST_OFF = 0.5
"""Integers that weights are from 0 on average: those of a wrong version are 1 off."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """``PackedLayout`` of GPTQ."""

    scheme: IntegerScheme
    checkpoint_format: str
    ignored: IgnoredModules = NOTHING_IGNORED
    packed: str = ".qweight"
    others: tuple[str, ...] = (".qzeros", ".scales", ".g_idx")

    @property
    def title(self) -> str:
        """See ``PackedLayout``."""
        order = ", act-order" if self.scheme.is_act_order else ""
        return f"GPTQ, {self.scheme.bits} bits, {layout.groups_in_words(self.scheme.group_size)}{order}"

    @property
    def _per_word(self) -> int:
        return layout.WORD_BITS // self.scheme.bits

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """See ``PackedLayout``."""
        num_words, num_outputs = layout.sides(stored, module + self.packed)
        return num_outputs, num_words * self._per_word

    def block_kind(self, stored: StoredTensors, module: str) -> str | None:
        """See ``PackedLayout``."""
        if self.scheme.mixes_groups:
            return None
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
        words = stored.read_as_stored(module + self.packed, layout.INT32)
        return ScaledIntegers(
            unpack(words.T, self.scheme.bits),
            self._zeros(stored, module, (groups, num_outputs)),
            scale_GO.T.contiguous(),
            self._order(stored, module, num_inputs, groups),
        )

    def check_values(self, stored: StoredTensors, modules: Sequence[str]) -> None:
        """See ``PackedLayout``: zeros of the other version would move every weight by its scale.

        One of 255 integers is too little to tell.
        """
        for module in modules:
            num_outputs = self.shape(stored, module)[0]
            layout.check_bits(stored, module, self.title, (self._zero_words(num_outputs), num_outputs))
        if self.scheme.is_symmetric or self.scheme.bits == 8:
            return
        sampled = modules[:: -(-len(modules) // _NUM_SAMPLED)]
        off = median(self.read(stored, module).mean_integer() for module in sampled)
        if abs(off) > _MOST_OFF:
            stated, other = sorted(_ZERO_LESS_ONE, key=lambda name: name != self.checkpoint_format)
            raise ModelFilesError(
                f"weights of {sampled[0]} and others are {off:+.1f} integers from 0 on average, so their zeros are not "
                f"of checkpoint_format {stated}: set checkpoint_format in quantization_config to {other}, or download "
                "the model again"
            )

    def _zeros(self, stored: StoredTensors, module: str, shape: tuple[int, int]) -> Tensor:
        """int16 ``[O, G]``."""
        name = f"{module}.qzeros"
        words = layout.read_fitting(stored, name, (shape[0], self._zero_words(shape[1])))
        if self.scheme.is_symmetric:
            return self._middles(name, self._unpacked(words, shape[1]))
        return self._unpacked(words + _ONES[self.scheme.bits] * _ZERO_LESS_ONE[self.checkpoint_format], shape[1])

    def _zero_words(self, num_outputs: int) -> int:
        """Of each group."""
        return -(-num_outputs // self._per_word)

    def _unpacked(self, words: Tensor, num_outputs: int) -> Tensor:
        return unpack(words, self.scheme.bits)[:, :num_outputs].T.contiguous().to(torch.int16)

    def _middles(self, name: str, stored_OG: Tensor) -> Tensor:
        """Of symmetric files, whichever version they say they are: some of the second call themselves the first."""
        middle = 1 << self.scheme.bits - 1
        if not any(bool((stored_OG == each).all()) for each in (middle, middle - 1)):
            raise ModelFilesError(
                f"tensor {name} holds zeros other than {middle}, but quantization_config says sym: set sym to false, "
                "or download the model again"
            )
        return torch.full_like(stored_OG, middle)

    def _order(self, stored: StoredTensors, module: str, num_inputs: int, groups: int) -> Tensor | None:
        name = f"{module}.g_idx"
        if not self.scheme.is_act_order and not stored.holds(name):
            return None
        group_I = layout.read_order(stored, name, num_inputs, groups)
        if group_I is not None and not self.scheme.is_act_order:
            raise ModelFilesError(
                f"tensor {name} has another order of inputs, but quantization_config says desc_act false: set it to "
                "true, or download the model again"
            )
        return group_I
