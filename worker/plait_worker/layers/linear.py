"""Matrix layers divided among the ranks.

Shapes: N rows (tokens), I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plait_kernels.linear import GgufWeight
from plait_kernels.linear.blocks import join
from torch import Tensor

from plait_worker.layers.matrix import gguf_matrix, matrix
from plait_worker.parallel import Parallel, Shard
from plait_worker.weights.reader import Weights

A8, A16 = 8, 16
"""What a row is rounded to before a product with quantised weights. The second, at twice the time, is for what moves a
model's answers most: queries and keys, and the head."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the file's matrices, whose outputs are divided among the ranks in whole units."""

    name: str
    num_units: int
    """Heads; or outputs."""
    unit_size: int = 1
    """Outputs of a unit."""
    units: Shard | None = None
    """This rank's units, where they are not an even shard."""
    has_bias: bool = True
    """Where those beside it have one."""

    @property
    def num_outputs(self) -> int:
        """Of the whole matrix."""
        return self.num_units * self.unit_size

    def shard(self, parallel: Parallel) -> Shard:
        """The outputs of this rank."""
        units = self.units if self.units is not None else Shard(parallel.shard(self.num_units))
        return units.times(self.unit_size)

    def take_outputs(self, weights: Weights, name: str, shape: tuple[int, ...], parallel: Parallel) -> Tensor:
        """This rank's rows of a tensor of the given whole shape."""
        shard = self.shard(parallel)
        tensor = weights.take(name, shape, rows=shard.own)
        return torch.cat((tensor, tensor.new_zeros(shard.num_empty, *shape[1:]))) if shard.num_empty else tensor

    def output_blocks(self, weights: Weights, num_inputs: int, parallel: Parallel) -> GgufWeight | None:
        """This rank's rows of ``NAME.weight``, quantised as the files have them; None where they cannot be."""
        shard = self.shard(parallel)
        shape = (self.num_outputs, num_inputs)
        return None if shard.num_empty else weights.blocks(f"{self.name}.weight", shape, rows=shard.own)

    def input_blocks(self, weights: Weights, name: str, num_outputs: int, parallel: Parallel) -> GgufWeight | None:
        """This rank's columns of a matrix, quantised as the files have them; None where they cannot be."""
        shard = self.shard(parallel)
        shape = (num_outputs, self.num_outputs)
        return None if shard.num_empty else weights.blocks(name, shape, columns=shard.own)

    def take_inputs(self, weights: Weights, name: str, num_outputs: int, parallel: Parallel) -> Tensor:
        """This rank's columns of a matrix whose inputs are this part's outputs."""
        shard = self.shard(parallel)
        weight = weights.take(name, (num_outputs, self.num_outputs), columns=shard.own)
        return F.pad(weight, (0, shard.num_empty)) if shard.num_empty else weight


class ColumnLinear:
    """Several matrices over one input, fused; every rank computes its shard of each one's outputs."""

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[Part],
        num_inputs: int,
        parallel: Parallel,
        bias: bool = False,
        activation_bits: int = A8,
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``) of each part; ``activation_bits`` is for quantised weights."""
        bias_O = _output_biases(weights, parts, parallel) if bias else None
        blocks = _output_blocks(weights, parts, num_inputs, parallel)
        if blocks is not None:
            self.multiply = gguf_matrix(blocks, bias_O, weights.dtype, activation_bits)
            return
        weight_OI = torch.cat(
            [
                part.take_outputs(weights, f"{part.name}.weight", (part.num_outputs, num_inputs), parallel)
                for part in parts
            ]
        )
        self.multiply = matrix(weight_OI, bias_O)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the parts side by side."""
        return self.multiply(x_NI)


def _output_biases(weights: Weights, parts: Sequence[Part], parallel: Parallel) -> Tensor:
    """The parts' biases in one; zeros for a part that has none."""
    return torch.cat(
        [
            part.take_outputs(weights, f"{part.name}.bias", (part.num_outputs,), parallel)
            if part.has_bias
            else torch.zeros(len(part.shard(parallel)), dtype=weights.dtype, device=weights.device)
            for part in parts
        ]
    )


def _output_blocks(weights: Weights, parts: Sequence[Part], num_inputs: int, parallel: Parallel) -> GgufWeight | None:
    """The parts' matrices in one, where all stay quantised in one way."""
    found = {f"{part.name}.weight": part.output_blocks(weights, num_inputs, parallel) for part in parts}
    blocks = {name: each for name, each in found.items() if each is not None}
    joined = join(list(blocks.values())) if len(blocks) == len(parts) else None
    if joined is not None:
        weights.keep(blocks)
    return joined


class RowLinear:
    """A matrix whose inputs are divided among the ranks; its output is their sum, on every rank."""

    def __init__(
        self, weights: Weights, name: str, inputs: Part, num_outputs: int, parallel: Parallel, bias: bool = False
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``); ``inputs`` tells how the inputs are divided."""
        self.parallel = parallel
        bias_O = weights.take(f"{name}.bias", (num_outputs,)) if bias else None
        own_bias_O = bias_O if parallel.rank == 0 else None  # added once, not once a rank
        blocks = inputs.input_blocks(weights, f"{name}.weight", num_outputs, parallel)
        if blocks is not None:
            weights.keep({f"{name}.weight": blocks})
            self.multiply = gguf_matrix(blocks, own_bias_O, weights.dtype, A8)
            return
        weight_OI = inputs.take_inputs(weights, f"{name}.weight", num_outputs, parallel)
        self.multiply = matrix(weight_OI, own_bias_O)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the same on every rank."""
        return self.parallel.all_reduce(self.multiply(x_NI))
