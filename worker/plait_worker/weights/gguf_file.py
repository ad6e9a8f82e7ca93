"""A GGUF file as a source of tensors, de-quantised on reading."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from plait_kernels.linear import BlockWeight
from plait_kernels.linear.blocks import KINDS
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import ModelConfig
from plait_worker.weights.gguf_config import GgufMetadata
from plait_worker.weights.gguf_header import GgufHeader, GgufTensor, read_header
from plait_worker.weights.gguf_names import hugging_face_names

ROPE_FACTORS = "rope_freqs.weight"
_ROWS = 128
"""De-quantised at a time: the library needs twice the memory of its result."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, or one expert's share of it."""

    tensor: GgufTensor
    expert: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def has_gemm(self) -> bool:
        """Whether it is a matrix whose block type has a GEMM."""
        return self.tensor.kind.name in KINDS and len(self.shape) == 2


class GgufFile:
    """``TensorSource`` of a GGUF file, which stays mapped as long as it exists."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises ``ModelFilesError``."""
        self.where = str(path)
        self._data = _map(path)
        header = read_header(self._data, self.where)
        self.metadata = GgufMetadata(header, self._rope_factors(header), self.where)
        self._by_name = {
            name: _Stored(tensor, expert)
            for tensor in header.tensors.values()
            if tensor.name != ROPE_FACTORS
            for name, expert in hugging_face_names(tensor.name, tensor.shape[0])
        }

    @property
    def names(self) -> Collection[str]:
        """Every tensor, in Hugging Face's spelling."""
        return self._by_name.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return self._by_name[name].shape

    def read(self, name: str) -> Tensor:
        """A tensor in float32."""
        stored = self._by_name[name]
        return torch.from_numpy(self._dequantise(stored)).view(stored.shape)

    def block_weight(self, name: str) -> BlockWeight | None:
        """A matrix whose block type the kernels take, copied out of the file."""
        stored = self._by_name[name]
        if not stored.has_gemm:
            return None
        return BlockWeight(stored.tensor.kind.name, torch.from_numpy(self._raw_rows(stored).copy()))

    def block_kind(self, name: str) -> str | None:
        """From the header."""
        stored = self._by_name[name]
        return stored.tensor.kind.name if stored.has_gemm else None

    def fp8_weight(self, name: str) -> None:
        """A GGUF has no FP8."""

    def fp8_bytes(self, name: str) -> None:
        """A GGUF has no FP8."""

    def int4_weight(self, _name: str) -> None:
        """Blocks are held as they are, or dense."""

    def int4_bytes(self, _name: str) -> None:
        """Blocks are held as they are, or dense."""

    def _dequantise(self, stored: _Stored) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        tensor, rows = stored.tensor, self._raw_rows(stored)
        numbers = np.empty((len(rows), prod(stored.shape) // len(rows)), np.float32)
        try:
            for first in range(0, len(rows), _ROWS):
                some = slice(first, first + _ROWS)
                numbers[some] = dequantize(rows[some], tensor.kind)
            return numbers
        except NotImplementedError as error:
            raise ModelFilesError(
                f"{self.where}: tensor {tensor.name} has the quantisation {tensor.kind.name}, which cannot be read; "
                "use a GGUF of another type, such as Q8_0 or Q4_K_M"
            ) from error

    def _raw_rows(self, stored: _Stored) -> NDArray[np.uint8]:
        """The bytes of each row, in the file's memory."""
        tensor = stored.tensor
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.begin)
        rows = raw.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
        return rows if stored.expert is None else rows[stored.expert].reshape(tensor.shape[1], -1)

    def _rope_factors(self, header: GgufHeader) -> tuple[float, ...] | None:
        """The frequencies' divisors that Llama 3.1's files carry."""
        if ROPE_FACTORS not in header.tensors:
            return None
        factors = self._dequantise(_Stored(header.tensors[ROPE_FACTORS], None)).flatten()
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelFilesError(
                f"{self.where}: {ROPE_FACTORS} holds a factor that is not positive: download it again"
            )
        return tuple(float(factor) for factor in factors)


class UnpermutedGguf:
    """``TensorSource`` of a GGUF whose query and key rows are in the order of rope on neighbours, given in halves."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """The file stays as it is."""
        self._file = file
        self._num_heads = {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}

    @property
    def names(self) -> Collection[str]:
        """The file's."""
        return self._file.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The file's."""
        return self._file.shape(name)

    def read(self, name: str) -> Tensor:
        """A tensor in float32, with query and key rows in Hugging Face's order."""
        return self._unpermuted(name, self._file.read(name))

    def block_weight(self, name: str) -> BlockWeight | None:
        """A quantised matrix, with rows in the same order."""
        weight = self._file.block_weight(name)
        return weight and BlockWeight(weight.kind, self._unpermuted(name, weight.raw))

    def block_kind(self, name: str) -> str | None:
        """The file's."""
        return self._file.block_kind(name)

    def fp8_weight(self, name: str) -> None:
        """A GGUF has no FP8."""

    def fp8_bytes(self, name: str) -> None:
        """A GGUF has no FP8."""

    def int4_weight(self, _name: str) -> None:
        """Blocks are held as they are, or dense."""

    def int4_bytes(self, _name: str) -> None:
        """Blocks are held as they are, or dense."""

    def _unpermuted(self, name: str, rows: Tensor) -> Tensor:
        return next((unpermute(rows, num) for part, num in self._num_heads.items() if part in name), rows)


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows ``(head, pair, half)``, for rope on neighbours, reordered to ``(head, half, pair)``."""
    return weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _map(path: Path) -> mmap:
    try:
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is empty: download it again") from error
