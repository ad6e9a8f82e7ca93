"""Hands a model its tensors, by Hugging Face's names, and notices what is missing, misshapen or left over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from plait_kernels.linear import GgufWeight
from torch import Tensor

from plait_worker.errors import ModelFilesError

NUM_NAMED = 5
"""Names that an error message lists at most."""
_LOOKED_UP = "embed_tokens.weight"
"""What tokens become is numbers, even where a head that is the same matrix stays quantised."""


class TensorSource(Protocol):
    """Opened model files."""

    @property
    def names(self) -> Collection[str]:
        """Every tensor's name, as Hugging Face spells it."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, in the file's floating type or, de-quantised, in float32."""
        ...

    def blocks(self, name: str) -> GgufWeight | None:
        """A quantised matrix as the file has it, where that is a kind that products take as it is."""
        ...

    def block_bytes(self, name: str) -> int | None:
        """What ``blocks`` would take, without reading it."""
        ...


class Held:
    """What a rank holds of its model so far."""

    def __init__(
        self, check: Callable[[int, int], None] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """``check`` is told the bytes held and those to come as they change, and raises where there is no room.

        ``progress`` is told how many of the expected bytes are still to come, and how many were.
        """
        self.taken: dict[str, int] = {}
        """Bytes that each tensor takes on this rank."""
        self.kinds: set[str] = set()
        """Kinds of blocks among them."""
        self.num_bytes = 0
        self._to_come: dict[str, int] = {}
        self._num_to_come = 0
        self._num_expected = 0
        self._num_passing = 0
        self._check = check
        self._progress = progress

    def expect(self, least_bytes: Mapping[str, int], num_passing: int = 0) -> None:
        """What each tensor will take at least, on all ranks together, and what reading takes more while it lasts."""
        self._to_come = dict(least_bytes)
        self._num_to_come = self._num_expected = sum(least_bytes.values())
        self._num_passing = num_passing
        self._check_room()

    def add(self, name: str, num_bytes: int) -> None:
        """One more tensor, or another form of one."""
        self.taken[name] = self.taken.get(name, 0) + num_bytes
        self.num_bytes += num_bytes
        self._num_to_come -= self._to_come.pop(name, 0)
        self._check_room()
        if self._progress is not None and self._num_expected:
            self._progress(self._num_to_come, self._num_expected)

    def _check_room(self) -> None:
        if self._check is not None:
            self._check(self.num_bytes, self._num_to_come + self._num_passing)


class Weights:
    """The tensors below one prefix, cut to a rank's share and moved to its device."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_quantised: bool = False,
        held: Held | None = None,
    ) -> None:
        """Nothing is read yet; ``keeps_quantised`` leaves matrices quantised as the files have them."""
        self.source = source
        self.dtype = dtype
        self.device = device
        self.keeps_quantised = keeps_quantised
        self.prefix = ""
        self.held = held or Held()
        """Of all prefixes."""

    def at(self, prefix: str) -> Weights:
        """The tensors whose names go on with ``prefix`` and a dot."""
        below = Weights(self.source, self.dtype, self.device, keeps_quantised=self.keeps_quantised, held=self.held)
        below.prefix = f"{self.prefix}{prefix}."
        return below

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor."""
        return self.prefix + name in self.source.names

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor of the given shape (the whole one), or the rows or columns of it that this rank holds.

        It comes in ``dtype``, the model's own where none is given.
        Raises ``ModelFilesError`` where the files lack it or give it another shape.
        """
        full_name = self._checked(name, shape)
        tensor = self._own(self._cut(self.source.read(full_name), rows, columns), dtype or self.dtype)
        self.held.add(full_name, tensor.nbytes)
        return tensor

    def blocks(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> GgufWeight | None:
        """The same of a matrix that stays quantised, for ``keep``; None where it must be taken as numbers.

        Raises ``ModelFilesError`` as ``take`` does.
        """
        full_name = self._checked(name, shape)
        blocks = self.source.blocks(full_name) if self.keeps_quantised else None
        if blocks is not None and rows is not None:
            blocks = blocks.rows(rows)
        if blocks is not None and columns is not None:
            blocks = blocks.columns(columns)
        return blocks

    def keep(self, blocks: Mapping[str, GgufWeight]) -> None:
        """Matrices that were not taken as numbers, by their names."""
        for name, each in blocks.items():
            self.held.add(self.prefix + name, each.raw.nbytes)
            self.held.kinds.add(each.kind)

    def least_bytes(self, unused: Collection[str]) -> dict[str, int]:
        """What each tensor in the files takes at least: a quantised one that may stay so its blocks, else numbers.

        Those of ``unused`` take nothing. One that is read as numbers all the same, or as both,
        takes more, which shows as it is read.
        """
        return {name: self._least_bytes(name) for name in self.source.names if name not in unused}

    def hold_more(self, name: str, num_bytes: int) -> None:
        """Count what a tensor that was taken takes beyond its numbers: a second form of it, or a wider one."""
        self.held.add(self.prefix + name, num_bytes)

    def _least_bytes(self, name: str) -> int:
        numbers = math.prod(self.source.shape(name)) * self.dtype.itemsize
        may_stay = self.keeps_quantised and not name.endswith(_LOOKED_UP)
        blocks = self.source.block_bytes(name) if may_stay else None
        return numbers if blocks is None else min(blocks, numbers)

    def _checked(self, name: str, shape: tuple[int, ...]) -> str:
        """The tensor's full name; raises ``ModelFilesError`` where the files lack it or give it another shape."""
        full_name = self.prefix + name
        if full_name not in self.source.names:
            raise ModelFilesError(f"the model files lack the tensor {full_name}: download them again")
        found = self.source.shape(full_name)
        if found != shape:
            raise ModelFilesError(
                f"tensor {full_name} has shape {list(found)}, but the configuration asks for {list(shape)}: "
                "the files do not belong together"
            )
        return full_name

    def _cut(self, tensor: Tensor, rows: range | None, columns: range | None) -> Tensor:
        if rows is not None:
            tensor = tensor[rows.start : rows.stop]
        if columns is not None:
            tensor = tensor[:, columns.start : columns.stop]
        return tensor

    def _own(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of its own: the source may lie in a mapped file."""
        return torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor)

    def check_leftovers(self, unused: Collection[str]) -> None:
        """Raise ``ModelFilesError`` if tensors were not taken that are not ``unused`` either."""
        left = sorted(name for name in self.source.names if name not in self.held.taken and name not in unused)
        if left:
            named = ", ".join(left[:NUM_NAMED]) + (" and more" if len(left) > NUM_NAMED else "")
            raise ModelFilesError(
                f"the model files hold {len(left)} tensors that this architecture has no place for ({named}): "
                "the model is of another kind than its configuration says, or a variant that is not supported"
            )
