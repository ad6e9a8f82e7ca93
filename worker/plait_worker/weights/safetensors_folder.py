"""A Hugging Face folder: ``config.json`` and safetensors, in one file or in shards named by an index."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from pathlib import Path
from typing import Protocol, cast

import torch
from plait_kernels.linear import Fp8Weight
from plait_kernels.linear.fp8 import GROUP
from plait_proto.quantisation import MODELOPT_FILE, with_modelopt_file
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.cache_scales import StoredScales, is_cache_scale
from plait_worker.weights.fields import Fields
from plait_worker.weights.formats.fp8_blocks import Fp8Blocks, scale_of_outputs
from plait_worker.weights.fp8_config import Fp8Scheme
from plait_worker.weights.packed.layout import PackedLayout
from plait_worker.weights.quantisation_config import check_not_ignored, read_quantisation, stated_cache

FP8 = "F8_E4M3"
"""What safetensors calls the type of FP8 weights."""
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""What it calls the types that scales come in."""
_OF_ACTIVATIONS = "input_scale"
"""Nothing reads these scales: rows get their own as they are computed."""
_KERNEL_BLOCKS = Fp8Blocks(GROUP, GROUP)
MAX_JSON_BYTES = 64 << 20
MAX_SHARDS = 4096
FLOATING = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the types that can be loaded."""


class _Slice(Protocol):
    """safetensors' description of a tensor; the library has no types."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _Shard(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """``TensorSource`` of a folder; its files stay mapped as long as it exists."""

    def __init__(self, path: Path) -> None:
        """Read the quantisation and the headers; raises ``ModelFilesError``."""
        stated = read_folder_config(path)
        scheme = read_quantisation(stated)
        self.fp8: Fp8Scheme | None = scheme if isinstance(scheme, Fp8Scheme) else None
        self.packed: PackedLayout | None = None if isinstance(scheme, Fp8Scheme) else scheme
        self._paths = _shards(path)
        self._files = [_open_shard(file) for file in self._paths]
        named = [(name, file) for file in self._files for name in file.keys()]  # noqa: SIM118 (no mapping)
        self._by_name = dict(named)
        if len(self._by_name) < len(named):
            raise ModelFilesError(f"{path} holds some tensors in more than one shard: download it again")
        self._stated_cache = stated_cache(stated)
        self._cache_scales = frozenset(filter(is_cache_scale, self._by_name))
        self._names = self._by_name.keys() - self._scale_names() - self._cache_scales

    @property
    def names(self) -> Set[str]:
        """Every tensor of every shard, but for the scales of quantised ones and of the cache."""
        return self._names

    @property
    def cache_scales(self) -> StoredScales:
        """What it has of the cache's scales."""
        return StoredScales(self, sorted(self._cache_scales), self._stated_cache)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return tuple(self._by_name[name].get_slice(name).get_shape())

    def mapped(self, name: str) -> Tensor:
        """A view of the mapped file, as it is stored."""
        return self._by_name[name].get_tensor(name)

    def num_bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self._paths)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file in the stored type; de-quantised tensors are float32."""
        if self.fp8 is not None and self.dtype(name) == FP8:
            return self._dequantised(name, self.fp8)
        return self.read_as_stored(name, FLOATING if self.fp8 is None else (*FLOATING, FP8))

    def fp8_weight(self, name: str) -> Fp8Weight | None:
        """In the mapped file, with its scales."""
        if self.fp8 is None or self.dtype(name) != FP8 or self.fp8.blocks not in (None, _KERNEL_BLOCKS):
            return None
        scale, weight_OI = self._scale(name, self.fp8), self.read_as_stored(name, (FP8,))
        if self.fp8.blocks is None:
            return Fp8Weight(weight_OI, scale)
        return Fp8Weight(weight_OI, scale.float(), GROUP)

    def fp8_bytes(self, name: str) -> int | None:
        """From the header, without the scales."""
        if self.fp8 is None or self.dtype(name) != FP8 or self.fp8.blocks not in (None, _KERNEL_BLOCKS):
            return None
        return math.prod(self.shape(name))

    def int4_weight(self, _name: str) -> None:
        """``PackedFolder`` has such matrices."""

    def int4_bytes(self, _name: str) -> None:
        """``PackedFolder`` has such matrices."""

    def _dequantised(self, name: str, fp8: Fp8Scheme) -> Tensor:
        scale, weight = self._scale(name, fp8), self.read_as_stored(name, (FP8,))
        return fp8.blocks.dequantise(weight, scale) if fp8.blocks else weight.float() * scale[:, None]

    def _scale(self, name: str, fp8: Fp8Scheme) -> Tensor:
        """Of blocks, or float32 of outputs; raises ``ModelFilesError`` if it does not fit the weights."""
        scale_name, shape = fp8.scale_name(name), self.shape(name)
        if scale_name not in self._by_name:
            raise ModelFilesError(f"the model files lack the tensor {scale_name}: download them again")
        stored = self.read_as_stored(scale_name, SCALE_TYPES)
        if not torch.isfinite(stored.float()).all():
            raise ModelFilesError(f"tensor {scale_name} holds a scale that is no number: download the model again")
        try:
            if fp8.blocks is None:
                return scale_of_outputs(shape, stored)
            fp8.blocks.check(shape, stored)
        except ValueError as error:
            raise ModelFilesError(
                f"tensor {name} cannot be de-quantised: {error}; correct it, or download the model again"
            ) from error
        return stored

    def read_as_stored(self, name: str, types: tuple[str, ...]) -> Tensor:
        """A view of the mapped file; raises ``ModelFilesError`` if its type is not one of ``types``."""
        dtype = self.dtype(name)
        if dtype not in types:
            raise ModelFilesError(
                f"tensor {name} is {dtype}, which is not supported there; {', '.join(types)} are: use the unquantised "
                "model or a GGUF"
            )
        return self.mapped(name)

    def block_weight(self, name: str) -> None:
        """A folder has no GGUF blocks."""

    def block_kind(self, name: str) -> None:
        """A folder has no GGUF blocks."""

    def _scale_names(self) -> set[str]:
        """Tensors that are read with the weights they belong to."""
        if self.fp8 is None and self.packed is None:
            return set()
        return self._fp8_scale_names() | {name for name in self._by_name if name.endswith(f".{_OF_ACTIVATIONS}")}

    def _fp8_scale_names(self) -> set[str]:
        if self.fp8 is None:
            return set()
        quantised = [name for name in self._by_name if self.dtype(name) == FP8]
        for name in quantised:
            check_not_ignored(name, name.removesuffix(".weight"), self.fp8.ignored)
        return {self.fp8.scale_name(name) for name in quantised}

    def holds(self, name: str) -> bool:
        """Whether a tensor is there, scales included."""
        return name in self._by_name

    def dtype(self, name: str) -> str:
        """What safetensors calls a tensor's type."""
        return self._by_name[name].get_slice(name).get_dtype()


def read_json(path: Path) -> Fields:
    """The object in a JSON file of at most 64 MiB; raises ``ModelFilesError`` naming the file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFilesError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: not a model's configuration")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror}; is this a model's folder?") from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} holds no JSON object: download it again")
    return Fields(value, str(path))


def read_folder_config(path: Path) -> Fields:
    """``config.json`` of a folder, with what ModelOpt's own file states beside it; raises ``ModelFilesError``."""
    config, beside = read_json(path / "config.json"), path / MODELOPT_FILE
    return with_modelopt_file(config, read_json(beside)) if beside.is_file() else config


def _shards(path: Path) -> list[Path]:
    """The files that hold the tensors."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [path / "model.safetensors"]
    listed = read_json(index).nested("weight_map").values.values()
    names = sorted({name for name in listed if isinstance(name, str)})
    if not 0 < len(names) <= MAX_SHARDS or any(Path(name).name != name for name in names):
        raise ModelFilesError(f"{index}: weight_map must name 1 to {MAX_SHARDS} files of the same folder")
    return [path / name for name in names]


def _open_shard(path: Path) -> _Shard:
    try:
        if not path.exists():
            raise ModelFilesError(f"{path} is missing: download the model again (weights must be safetensors or GGUF)")
        return cast(_Shard, safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{path} is broken or truncated ({error}): download it again") from error
