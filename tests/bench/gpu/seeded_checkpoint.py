"""A checkpoint of a shape's own size, of the numbers that `--load-format dummy` draws.

    python tests/bench/gpu/seeded_checkpoint.py FOLDER

adds safetensors files and their index to a folder that `model_shapes.py` made; on a file system in memory they are as
near as a page cache has them. Drawn on the GPU where there is one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from plait_worker.models.loader import open_config, read_model
from plait_worker.parallel import Parallel
from plait_worker.weights.dummy import DummyWeights
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 << 30
DTYPE = torch.bfloat16
Shapes = dict[str, tuple[int, ...]]


class NamedWeights(DummyWeights):
    """Draws nothing, and keeps the name and shape of each tensor that a model asks for."""

    def __init__(self, shapes: Shapes, prefix: str = "") -> None:
        super().__init__(DTYPE, torch.device("meta"))
        self.prefix, self.shapes = prefix, shapes

    def with_prefix(self, prefix: str) -> NamedWeights:
        return NamedWeights(self.shapes, f"{self.prefix}{prefix}.")

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        self.shapes[self.prefix + name] = shape
        return super().take(name, shape, rows, columns, dtype)


def write_checkpoint(folder: Path) -> None:
    """Every tensor that the folder's `config.json` asks for."""
    shapes: Shapes = {}
    with torch.inference_mode():
        read_model(open_config(folder), NamedWeights(shapes), Parallel(0, 1), None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = DummyWeights(DTYPE, device)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards(shapes)):
        file = f"model-{number:05d}.safetensors"
        save_file({name: weights.take(name, shape).cpu() for name, shape in shard.items()}, folder / file)
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(map(num_bytes, shapes.values()))}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Shapes]:
    """The tensors, file by file."""
    shard: Shapes = {}
    for name, shape in shapes.items():
        if shard and sum(map(num_bytes, shard.values())) + num_bytes(shape) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def num_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE.itemsize


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
