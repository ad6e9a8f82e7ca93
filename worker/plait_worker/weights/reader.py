"""Reads a model's tensors by Hugging Face's names; reports those that are missing, left over or of the wrong shape."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from plait_kernels.linear import BlockWeight, Fp8Weight, Int4Weight, Matrix
from plait_kernels.linear.blocks import panel_bytes
from plait_kernels.moe import Experts
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.parallel import Shard
from plait_worker.weights.source import TensorSource
from plait_worker.weights.weight_memory import WeightMemory

NUM_NAMED = 5
"""Names that an error message lists at most."""
_SCALES_OF = {
    "_scale_inv": "FP8 blocks, which quant_method fp8 and weight_block_size state",
    "_scale": "FP8 by other quant_methods, or by fp8 without weight_block_size",
}
"""What files call the scales of a tensor, and how a configuration says so."""
_PIECE_BYTES = 64 << 20
"""Whole rows that are copied to a GPU at a time, where a rank keeps some of their columns."""
_LOOKED_UP = "embed_tokens.weight"
"""Embeddings are dense, even if a head that is the same matrix stays quantised."""


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """A rank's part of one of the files' matrices ``[outputs, inputs]``."""

    name: str
    shape: tuple[int, int]
    """Of the whole matrix."""
    rows: Shard | None = None
    """Outputs of this rank; None for all."""
    columns: Shard | None = None
    """Inputs of this rank; None for all."""

    @property
    def is_padded(self) -> bool:
        """Whether it has outputs or inputs that the files do not have."""
        return any(shard is not None and shard.num_empty > 0 for shard in (self.rows, self.columns))


StoredT = TypeVar("StoredT")
ExpertShards = tuple[Sequence[MatrixShard], Sequence[MatrixShard]]
"""Gate and up, then down."""


class WeightFormat(Protocol[StoredT]):
    """How matrices are held: it reads and cuts them, joins them, multiplies by them, and stacks experts.

    What it does not take goes to the next format of ``Weights.formats``, and in the end to ``dense``.
    """

    @property
    def is_quantised(self) -> bool:
        """Whether matrices stay quantised in memory."""
        ...

    def takes_experts(self, weights: Weights, first: ExpertShards) -> bool:
        """Whether there are kernels for a layer's experts in this format; the first of them is as all."""
        ...

    def stored_bytes(self, source: TensorSource, name: str) -> int | None:
        """What a whole matrix takes, without reading it; None if it is not taken, or held dense."""
        ...

    def read(self, weights: Weights, shard: MatrixShard) -> StoredT | None:
        """The shard; None if the files do not have it in this format, or if its bounds cut a block."""
        ...

    def join(self, weights: Weights, shards: Sequence[MatrixShard], stored: Sequence[StoredT]) -> StoredT | None:
        """Matrices over the same inputs in one, outputs in order, which are held from now on; None if they differ."""
        ...

    def matrix(self, stored: StoredT, bias_O: Tensor | None, dtype: torch.dtype, activation_bits: int) -> Matrix:
        """What a linear layer multiplies by; quantised formats round its inputs to ``activation_bits``."""
        ...

    def experts(self, stored: Iterator[tuple[StoredT, StoredT]], dtype: torch.dtype) -> Experts:
        """The stack of experts from gate and up, then down, of each; rows are of ``dtype``."""
        ...


class Weights:
    """The tensors below one prefix, cut to a rank's share and moved to its device."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        formats: Sequence[WeightFormat[Any]] = (),
        held: WeightMemory | None = None,
    ) -> None:
        """Nothing is read yet; ``formats`` are tried in order for each matrix, before dense."""
        self.source = source
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self.prefix = ""
        self.held = held or WeightMemory()
        """Of all prefixes."""

    def with_prefix(self, prefix: str) -> Weights:
        """The tensors whose names go on with ``prefix`` and a dot."""
        below = Weights(self.source, self.dtype, self.device, formats=self.formats, held=self.held)
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
        """A tensor, or this rank's rows or columns of it; ``shape`` is that of the whole tensor.

        It comes in ``dtype``, by default the model's own.
        Raises ``ModelFilesError`` if the files lack it or give it another shape.
        """
        full_name = self._check_tensor(name, shape)
        stored = self.source.read(full_name)
        if columns is not None and self.device.type == "cuda":
            tensor = self._copy_columns(stored, columns, dtype or self.dtype)
        else:
            tensor = self._copy_to_device(self._slice(stored, rows, columns), dtype or self.dtype)
        self.held.add(full_name, tensor.nbytes)
        return tensor

    def take_indices(self, name: str, shape: tuple[int, ...], num: int, of: str) -> Tensor:
        """int64: a tensor that names some of ``num`` things; ``of`` says what one is.

        Raises ``ModelFilesError`` as ``take`` does, or if one is named that does not exist.
        """
        indices = self.take(name, shape, dtype=torch.int64)
        low, high = (int(each) for each in indices.aminmax())
        if low < 0 or high >= num:
            raise ModelFilesError(
                f"tensor {self.prefix}{name} names {of} {low if low < 0 else high}, but there are {num}, from 0: "
                "download the model again"
            )
        return indices

    def block_weight(self, name: str, shape: tuple[int, ...]) -> BlockWeight | None:
        """A whole matrix in blocks that have a kernel, for ``keep``; None if it must be taken dense.

        Raises ``ModelFilesError`` as ``take`` does.
        """
        return self.source.block_weight(self._check_tensor(name, shape))

    def keep(self, name: str, weight: BlockWeight) -> None:
        """Count a matrix, or a shard of it, that stays quantised in panels."""
        self.held.add(self.prefix + name, panel_bytes(weight.kind, *weight.shape))
        self.held.quantised_types.add(weight.kind)

    def fp8_weight(self, name: str, shape: tuple[int, ...]) -> Fp8Weight | None:
        """A whole FP8 matrix on the CPU, for ``keep_fp8``; None if it must be taken dense.

        Raises ``ModelFilesError`` as ``take`` does.
        """
        return self.source.fp8_weight(self._check_tensor(name, shape))

    def keep_fp8(self, name: str, weight: Fp8Weight) -> None:
        """Count a matrix, or a shard of it, that is held in FP8."""
        self.held.add(self.prefix + name, weight.nbytes)
        self.held.quantised_types.add("FP8")

    def int4_weight(self, name: str, shape: tuple[int, ...]) -> Int4Weight | None:
        """A whole matrix of 4-bit codes on the CPU, for ``keep_int4``; None if it must be taken dense.

        Raises ``ModelFilesError`` as ``take`` does.
        """
        return self.source.int4_weight(self._check_tensor(name, shape))

    def keep_int4(self, name: str, weight: Int4Weight) -> None:
        """Count a matrix, or a shard of it, that is held as 4-bit codes."""
        self.held.add(self.prefix + name, weight.nbytes)
        self.held.quantised_types.add(weight.kind.upper())

    def uncounted(self) -> Weights:
        """The same tensors, for what is read only to be held in another form."""
        same = Weights(self.source, self.dtype, self.device, formats=self.formats)
        same.prefix = self.prefix
        return same

    def least_bytes(self, unused: Collection[str], dense: Collection[str] = ()) -> dict[str, int]:
        """What each tensor in the files takes at least; those of ``unused`` take nothing, ``dense`` have no blocks.

        One that is taken dense all the same, or in two forms, takes more, which shows as it is read.
        """
        return {name: self._least_bytes(name, dense) for name in self.source.names if name not in unused}

    def hold_more(self, name: str, num_bytes: int) -> None:
        """Count bytes of a second or larger form of a tensor that was taken."""
        self.held.add(self.prefix + name, num_bytes)

    def _least_bytes(self, name: str, dense: Collection[str]) -> int:
        upcast = math.prod(self.source.shape(name)) * self.dtype.itemsize
        if name.endswith(_LOOKED_UP) or name in dense:
            return upcast
        stored = (each.stored_bytes(self.source, name) for each in self.formats)
        return min([upcast, *(num_bytes for num_bytes in stored if num_bytes is not None)])

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> str:
        """The tensor's full name; raises ``ModelFilesError`` if the files lack it or give it another shape."""
        full_name = self.prefix + name
        if full_name not in self.source.names:
            raise ModelFilesError(f"the model files lack the tensor {full_name}: download them again")
        self._check_no_other_scales(full_name)
        found = self.source.shape(full_name)
        if found != shape:
            raise ModelFilesError(
                f"tensor {full_name} has shape {list(found)}, but the configuration asks for {list(shape)}: "
                "the files do not belong together"
            )
        return full_name

    def _check_no_other_scales(self, full_name: str) -> None:
        """Raise ``ModelFilesError`` if scales lie beside a tensor whose form has others, or none."""
        for ending, form in _SCALES_OF.items():
            if full_name + ending in self.source.names:
                raise ModelFilesError(
                    f"the model files hold {full_name}{ending}, but quantization_config asks for other scales, or "
                    f"none: those are of {form}; correct it there, or download config.json again"
                )

    def _slice(self, tensor: Tensor, rows: range | None, columns: range | None) -> Tensor:
        if rows is not None:
            tensor = tensor[rows.start : rows.stop]
        if columns is not None:
            tensor = tensor[:, columns.start : columns.stop]
        return tensor

    def _copy_to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy: the source may be a mapped file."""
        return torch.empty(tensor.shape, dtype=dtype, device=self.device).copy_(tensor)

    def _copy_columns(self, tensor: Tensor, columns: range, dtype: torch.dtype) -> Tensor:
        """The same for columns of a matrix: cut on the device, since a copy of cut rows is made on the host first."""
        copy = torch.empty((tensor.shape[0], len(columns)), dtype=dtype, device=self.device)
        num_rows = max(1, _PIECE_BYTES // max(1, tensor[:1].nbytes))
        for rows, cut in zip(tensor.split(num_rows), copy.split(num_rows), strict=True):
            cut.copy_(self._slice(rows.to(self.device), None, columns))
        return copy

    def check_leftovers(self, unused: Collection[str]) -> None:
        """Raise ``ModelFilesError`` if tensors were not taken that are not ``unused`` either."""
        left = sorted(name for name in self.source.names if name not in self.held.taken and name not in unused)
        if left:
            named = ", ".join(left[:NUM_NAMED]) + (" and more" if len(left) > NUM_NAMED else "")
            raise ModelFilesError(
                f"the model files hold {len(left)} tensors that this architecture does not use ({named}): "
                "the model is of another kind than its configuration says, or a variant that is not supported"
            )
