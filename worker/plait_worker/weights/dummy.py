"""Random weights, for measuring a model of which only the configuration is available."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait_worker.weights.reader import Weights
from plait_worker.weights.weight_memory import WeightMemory

SPREAD = 0.02
"""Standard deviation of the matrices: wide enough that a router sends tokens to different experts."""
_SEED = 0


class DummyWeights(Weights):
    """Every tensor that a model reads: normally distributed, norms all ones; the same at every start."""

    def __init__(self, dtype: torch.dtype, device: torch.device, held: WeightMemory | None = None) -> None:
        """No tensor is made yet. On torch's meta device none ever is; ``held`` then has the sizes."""
        self.dtype = dtype
        self.device = device
        self.formats = ()
        self.held = held or WeightMemory()
        self.generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(_SEED)

    def with_prefix(self, _prefix: str) -> DummyWeights:
        """Itself: no name is looked up."""
        return self

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
        self.held.add(f"{len(self.held.taken)} {name}", math.prod(cut) * kept_as.itemsize)
        tensor = torch.ones(cut, dtype=self.dtype, device=self.device)
        if len(shape) > 1 and not tensor.is_meta:
            tensor.normal_(0, SPREAD, generator=self.generator)
        # Files hold the model's type whatever a layer computes in.
        return tensor.to(kept_as)

    def hold_more(self, name: str, num_bytes: int) -> None:
        """See ``Weights``."""
        self.held.add(f"{len(self.held.taken)} {name}", num_bytes)
