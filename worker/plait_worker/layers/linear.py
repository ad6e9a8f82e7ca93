"""Matrix layers divided among the ranks.

Shapes: N rows (tokens), I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.layers.matrix import matrix
from plait_worker.parallel import Parallel
from plait_worker.weights.reader import Weights


@dataclass(frozen=True, slots=True)
class Part:
    """One of the file's matrices, whose outputs are divided among the ranks in whole units."""

    name: str
    num_units: int
    """Heads; or outputs."""
    unit_size: int = 1
    """Outputs of a unit."""

    @property
    def num_outputs(self) -> int:
        """Of the whole matrix."""
        return self.num_units * self.unit_size

    def rows(self, parallel: Parallel) -> range:
        """The outputs of this rank."""
        units = parallel.share(self.num_units)
        return range(units.start * self.unit_size, units.stop * self.unit_size)


class ColumnLinear:
    """Several matrices over one input, fused; every rank computes its share of each one's outputs."""

    def __init__(
        self, weights: Weights, parts: Sequence[Part], num_inputs: int, parallel: Parallel, bias: bool = False
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``) of each part."""
        weight_OI = torch.cat(
            [
                weights.take(f"{part.name}.weight", (part.num_outputs, num_inputs), rows=part.rows(parallel))
                for part in parts
            ]
        )
        biases = [
            weights.take(f"{part.name}.bias", (part.num_outputs,), rows=part.rows(parallel)) for part in parts if bias
        ]
        self.multiply = matrix(weight_OI, torch.cat(biases) if biases else None)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the parts side by side."""
        return self.multiply(x_NI)


class RowLinear:
    """A matrix whose inputs are divided among the ranks; its output is their sum, on every rank."""

    def __init__(
        self, weights: Weights, name: str, inputs: Part, num_outputs: int, parallel: Parallel, bias: bool = False
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``); ``inputs`` tells how the inputs are divided."""
        columns = inputs.rows(parallel)
        self.parallel = parallel
        weight_OI = weights.take(f"{name}.weight", (num_outputs, inputs.num_outputs), columns=columns)
        bias_O = weights.take(f"{name}.bias", (num_outputs,)) if bias else None
        self.multiply = matrix(weight_OI, bias_O if parallel.rank == 0 else None)  # added once, not once a rank

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the same on every rank."""
        return self.parallel.all_reduce(self.multiply(x_NI))
