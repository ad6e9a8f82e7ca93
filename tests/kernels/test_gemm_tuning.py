"""The table of products that our own kernel takes holds what the kernel can do."""

import json

import pytest
from plait_kernels.linear import TABLE, Tile

BY_SHAPE: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text())


@pytest.mark.parametrize("shape", BY_SHAPE)
def test_tiles_take_their_matrices(shape: str) -> None:
    num_outputs, num_inputs = map(int, shape.split("x"))
    for most_rows, numbers in BY_SHAPE[shape].items():
        assert most_rows in ("16", "32", "64")
        assert Tile(*numbers).takes(num_outputs, num_inputs)
