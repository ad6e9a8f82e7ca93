"""Random weights, for measuring a model of which only the configuration is available."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from plait_kernels.linear import Int4Weight
from plait_kernels.linear.int4 import FLOAT, INTEGER, MIDDLE, stored_shape
from torch import Tensor

from plait_worker.weights.packed.layout import Int4Form
from plait_worker.weights.reader import WeightFormat, Weights
from plait_worker.weights.weight_memory import WeightMemory

SPREAD = 0.02
"""Standard deviation of the matrices: wide enough that a router sends tokens to different experts."""
CODE_SPREAD = 4.6
"""Of the integers from 0 to 15."""


class DummyWeights(Weights):
    """Every tensor that a model reads: normally distributed, norms all ones.

    A tensor is drawn whole, seeded by its name, and then cut: the same model at every start and on any number of ranks.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        held: WeightMemory | None = None,
        formats: Sequence[WeightFormat[Any]] = (),
        int4: Int4Form | None = None,
    ) -> None:
        """No tensor is made yet. On torch's meta device none ever is; ``held`` then has the sizes.

        ``int4`` is the form of matrices for the format of 4-bit codes.
        """
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self.int4 = int4
        self.prefix = ""
        self.held = held or WeightMemory()
        self.generator = torch.Generator("cpu" if device.type == "meta" else device)

    def with_prefix(self, prefix: str) -> DummyWeights:
        """See ``Weights``."""
        below = DummyWeights(self.dtype, self.device, self.held, self.formats, self.int4)
        below.prefix = f"{self.prefix}{prefix}."
        return below

    def uncounted(self) -> DummyWeights:
        """See ``Weights``."""
        same = DummyWeights(self.dtype, self.device, formats=self.formats, int4=self.int4)
        same.prefix = self.prefix
        return same

    def int4_weight(self, name: str, shape: tuple[int, ...]) -> Int4Weight | None:
        """Codes of all sixteen values, with the spread of the other matrices; None if kernels do not take the shape."""
        num_outputs, num_inputs = shape
        if self.int4 is None or self.int4.num_bytes((num_outputs, num_inputs)) is None:
            return None
        size = self.int4.group_size or num_inputs
        codes = torch.empty(stored_shape(num_outputs, num_inputs), dtype=torch.int16, device=self.device)
        if self.device.type != "meta":
            codes.random_(-(1 << 15), 1 << 15, generator=self.generator.manual_seed(_seed(self.prefix + name)))
        groups = (num_inputs // size, num_outputs)
        scale = torch.full(groups, SPREAD / CODE_SPREAD, dtype=torch.float16, device=self.device)
        if self.device.type != "meta" and not self.int4.is_float:
            # Codes lie half a step below their middle: with one sign, every output had the sum of all inputs in it.
            scale *= 1 - 2 * torch.randint(2, groups, generator=self.generator, device=self.device)
        has_zero = self.int4.has_zero
        zero = torch.full(groups, MIDDLE, dtype=torch.uint8, device=self.device) if has_zero else None
        return Int4Weight(codes, scale, zero, num_inputs, size, FLOAT if self.int4.is_float else INTEGER)

    def has(self, _name: str) -> bool:
        """It has every tensor."""
        return True

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's shard of a tensor of the given shape, made on the device after the memory check."""
        num_rows = len(rows) if rows is not None else shape[0]
        cut = (num_rows, *([len(columns)] if columns is not None else shape[1:]))
        kept_as = dtype or self.dtype
        self.held.add(self.prefix + name, math.prod(cut) * kept_as.itemsize)
        if len(shape) == 1 or self.device.type == "meta":
            # Files hold the model's type whatever a layer computes in.
            return torch.ones(cut, dtype=self.dtype, device=self.device).to(kept_as)
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        whole.normal_(0, SPREAD, generator=self.generator.manual_seed(_seed(self.prefix + name)))
        return whole.to(kept_as) if cut == shape else self._slice(whole, rows, columns).to(kept_as, copy=True)

    def take_indices(self, name: str, shape: tuple[int, ...], num: int, of: str) -> Tensor:
        """See ``Weights``: any of them."""
        self.held.add(self.prefix + name, math.prod(shape) * torch.int64.itemsize)
        indices = torch.zeros(shape, dtype=torch.int64, device=self.device)
        if self.device.type == "meta":
            return indices
        return indices.random_(num, generator=self.generator.manual_seed(_seed(self.prefix + name)))


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
