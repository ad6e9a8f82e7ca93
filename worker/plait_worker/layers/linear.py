"""Linear layers, sharded among the ranks.

Shapes: N rows (tokens), I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.parallel import Parallel, Shard
from plait_worker.weights.formats.read import A8, read_matrix
from plait_worker.weights.reader import MatrixShard, Weights


@dataclass(frozen=True, slots=True)
class Projection:
    """One of the files' matrices, whose outputs are sharded in whole units."""

    name: str
    num_units: int
    """Heads; or outputs."""
    unit_size: int = 1
    """Outputs of a unit."""
    units: Shard | None = None
    """This rank's units, if they are not an even shard."""
    has_bias: bool = True
    """Whether it has a bias if its neighbours have one."""

    @property
    def num_outputs(self) -> int:
        """Of the whole matrix."""
        return self.num_units * self.unit_size

    def shard(self, parallel: Parallel) -> Shard:
        """The outputs of this rank."""
        units = self.units if self.units is not None else Shard(parallel.shard(self.num_units))
        return units.times(self.unit_size)

    def take(self, weights: Weights, name: str, shape: tuple[int, ...], parallel: Parallel) -> Tensor:
        """This rank's rows of a dense tensor of the given whole shape."""
        shard = self.shard(parallel)
        tensor = weights.take(name, shape, rows=shard.own)
        return torch.cat((tensor, tensor.new_zeros(shard.num_empty, *shape[1:]))) if shard.num_empty else tensor

    def outputs(self, num_inputs: int, parallel: Parallel) -> MatrixShard:
        """This rank's rows of ``NAME.weight``."""
        return MatrixShard(f"{self.name}.weight", (self.num_outputs, num_inputs), rows=self.shard(parallel))

    def inputs(self, name: str, num_outputs: int, parallel: Parallel) -> MatrixShard:
        """This rank's columns of a matrix whose inputs are this projection's outputs."""
        return MatrixShard(f"{name}.weight", (num_outputs, self.num_outputs), columns=self.shard(parallel))


class ColumnLinear:
    """Column-parallel: several matrices over one input, fused; a rank computes its shard of each one's outputs."""

    def __init__(
        self,
        weights: Weights,
        projections: Sequence[Projection],
        num_inputs: int,
        parallel: Parallel,
        bias: bool = False,
        activation_bits: int = A8,
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``) of each; ``activation_bits`` is for quantised weights."""
        bias_O = _output_biases(weights, projections, parallel) if bias else None
        shards = [each.outputs(num_inputs, parallel) for each in projections]
        self.multiply = read_matrix(weights, shards, bias_O, activation_bits)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, the matrices' outputs in order."""
        return self.multiply(x_NI)


def _output_biases(weights: Weights, projections: Sequence[Projection], parallel: Parallel) -> Tensor:
    """All biases in one; zeros for a projection that has none."""
    return torch.cat(
        [
            each.take(weights, f"{each.name}.bias", (each.num_outputs,), parallel)
            if each.has_bias
            else torch.zeros(len(each.shard(parallel)), dtype=weights.dtype, device=weights.device)
            for each in projections
        ]
    )


class RowLinear:
    """Row-parallel: the inputs are sharded, and each rank has a partial sum, which the next norm adds up."""

    def __init__(
        self, weights: Weights, name: str, inputs: Projection, num_outputs: int, parallel: Parallel, bias: bool = False
    ) -> None:
        """Read ``NAME.weight`` (and ``NAME.bias``); ``inputs`` is the projection whose outputs it takes."""
        self.has_bias = bias
        bias_O = weights.take(f"{name}.bias", (num_outputs,)) if bias else None
        own_bias_O = bias_O if parallel.rank == 0 else None  # added once, not once a rank
        self.multiply = read_matrix(weights, [inputs.inputs(name, num_outputs, parallel)], own_bias_O)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]``, this rank's partial sum."""
        return self.multiply(x_NI)
