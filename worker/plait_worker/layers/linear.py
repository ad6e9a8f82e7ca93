"""Matrix layers divided among the ranks.

Shapes: N rows (tokens), I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_worker.layers.matrix import matrix
from plait_worker.parallel import Parallel, Share
from plait_worker.weights.reader import Weights


@dataclass(frozen=True, slots=True)
class Part:
    """One of the file's matrices, whose outputs are divided among the ranks in whole units."""

    name: str
    num_units: int
    """Heads; or outputs."""
    unit_size: int = 1
    """Outputs of a unit."""
    units: Share | None = None
    """This rank's units, where they are not an even share."""
    has_bias: bool = True
    """Where those beside it have one."""

    @property
    def num_outputs(self) -> int:
        """Of the whole matrix."""
        return self.num_units * self.unit_size

    def share(self, parallel: Parallel) -> Share:
        """The outputs of this rank."""
        units = self.units if self.units is not None else Share(parallel.share(self.num_units))
        return units.times(self.unit_size)

    def take_outputs(self, weights: Weights, name: str, shape: tuple[int, ...], parallel: Parallel) -> Tensor:
        """This rank's rows of a tensor of the given whole shape."""
        share = self.share(parallel)
        tensor = weights.take(name, shape, rows=share.own)
        return torch.cat((tensor, tensor.new_zeros(share.num_empty, *shape[1:]))) if share.num_empty else tensor

    def take_inputs(self, weights: Weights, name: str, num_outputs: int, parallel: Parallel) -> Tensor:
        """This rank's columns of a matrix whose inputs are this part's outputs."""
        share = self.share(parallel)
        weight = weights.take(name, (num_outputs, self.num_outputs), columns=share.own)
        return F.pad(weight, (0, share.num_empty)) if share.num_empty else weight


class ColumnLinear:
    """Several matrices over one input, fused; every rank computes its share of each one's outputs."""

    def __init__(
        self, weights: Weights, parts: Sequence[Part], num_inputs: int, parallel: Parallel, bias: bool = False
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``) of each part."""
        weights_OI = [
            part.take_outputs(weights, f"{part.name}.weight", (part.num_outputs, num_inputs), parallel)
            for part in parts
        ]
        weight_OI = torch.cat(weights_OI)
        biases = [
            part.take_outputs(weights, f"{part.name}.bias", (part.num_outputs,), parallel)
            if part.has_bias
            else own_OI.new_zeros(len(own_OI))
            for part, own_OI in zip(parts, weights_OI, strict=True)
            if bias
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
        self.parallel = parallel
        weight_OI = inputs.take_inputs(weights, f"{name}.weight", num_outputs, parallel)
        bias_O = weights.take(f"{name}.bias", (num_outputs,)) if bias else None
        self.multiply = matrix(weight_OI, bias_O if parallel.rank == 0 else None)  # added once, not once a rank

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the same on every rank."""
        return self.parallel.all_reduce(self.multiply(x_NI))
