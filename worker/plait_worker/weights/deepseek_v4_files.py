"""DeepSeek-V4's folders: two sets of tensor names, and matrices in FP8 and MXFP4 with a ``.scale`` beside them.

Tensors go by the published names, which have no ``model.`` in front. ``save_pretrained`` of transformers writes others.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from plait_kernels.linear import BlockWeight
from plait_proto.quantisation import IgnoredModules
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.formats import mxfp4
from plait_worker.weights.formats.fp8_blocks import Fp8Blocks
from plait_worker.weights.packed.mxfp4 import PackedMxfp4
from plait_worker.weights.safetensors_folder import FLOATING, FP8, SCALE_TYPES, SafetensorsFolder

_SAVED = (
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".attn.norm.", ".attn.kv_norm."),
)
"""Parts of the names that ``save_pretrained`` writes, and of the published ones."""
_EXPERT_TABLE = ".tid2eid"
_INTEGERS = ("I64", "I32")
_BLOCKS = Fp8Blocks(128, 128)
"""Unless the configuration states others."""
_MXFP4 = PackedMxfp4(IgnoredModules(), packed=".weight", others=(".scale",))
_EXPONENTS = "F8_E8M0"


def published_name(name: str) -> str:
    """What the published files call a tensor."""
    name = name.removeprefix("model.")
    for saved, published in _SAVED:
        name = name.replace(saved, published)
    return name


class DeepseekV4Files:
    """``TensorSource`` of a folder."""

    def __init__(self, path: Path) -> None:
        """Read the headers; raises ``ModelFilesError``."""
        self._folder = SafetensorsFolder(path)
        if (packed := self._folder.packed) is not None:
            raise ModelFilesError(
                f"{path}: {packed.title} is not supported for DeepSeek-V4; use the published files, in FP8 and MXFP4"
            )
        stated = self._folder.fp8
        self._blocks = _BLOCKS if stated is None or stated.blocks is None else stated.blocks
        scales = {_scale_name(name) for name in self._folder.names if self._is_quantised(name)}
        stored = [name for name in self._folder.names if name not in scales]
        self._stored = {published_name(name): name for name in stored}
        self._kinds = dict[str, str | None]()
        if len(self._stored) < len(stored):
            raise ModelFilesError(f"{path} holds some tensors under two names: download it again")

    @property
    def names(self) -> Collection[str]:
        """Every tensor's published name, but for the scales."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the de-quantised tensor."""
        shape = self._folder.shape(self._stored[name])
        return mxfp4.unpacked_shape(shape) if self._is_packed(self._stored[name]) else shape

    def read(self, name: str) -> Tensor:
        """As stored; de-quantised matrices are float32."""
        stored = self._stored[name]
        if name.endswith(_EXPERT_TABLE):
            return self._folder.read_as_stored(stored, _INTEGERS)
        if not self._is_quantised(stored):
            return self._folder.read_as_stored(stored, FLOATING)
        scale = _scale_name(stored)
        if not self._folder.holds(scale):
            raise ModelFilesError(f"the model files lack the tensor {scale}: download them again")
        factors = self._folder.read_as_stored(scale, SCALE_TYPES)
        try:
            return self._dequantised(stored, factors)
        except ValueError as error:
            raise ModelFilesError(f"tensor {name} cannot be de-quantised: {error}; download the model again") from error

    def block_weight(self, name: str) -> BlockWeight | None:
        """A matrix of MXFP4, repacked; its values stay exact."""
        kind = self.block_kind(name)
        return None if kind is None else _MXFP4.read(self._folder, self._module(name)).blocks(kind)

    def block_kind(self, name: str) -> str | None:
        """From the header, and the scales, which are looked at once."""
        if name not in self._kinds:
            self._kinds[name] = self._block_kind(name)
        return self._kinds[name]

    def fp8_weight(self, _name: str) -> None:
        """Matrices are read dense."""

    def fp8_bytes(self, _name: str) -> None:
        """Matrices are read dense."""

    def int4_weight(self, _name: str) -> None:
        """Matrices are read dense."""

    def int4_bytes(self, _name: str) -> None:
        """Matrices are read dense."""

    def _block_kind(self, name: str) -> str | None:
        scale, module = _scale_name(self._stored[name]), self._module(name)
        if not self._is_packed(self._stored[name]) or not self._folder.holds(scale):
            return None
        has_blocks = self._folder.dtype(scale) == _EXPONENTS and _MXFP4.has_half_scales(self._folder, module)
        return _MXFP4.block_kind(self._folder, module) if has_blocks else None

    def _module(self, name: str) -> str:
        return self._stored[name].removesuffix(".weight")

    def _dequantised(self, stored: str, factors: Tensor) -> Tensor:
        weight = self._folder.mapped(stored)
        if self._is_packed(stored):
            return mxfp4.dequantise(weight, factors)
        return self._blocks.dequantise(weight.view(torch.float8_e4m3fn), factors)

    def _is_quantised(self, stored: str) -> bool:
        return self._folder.dtype(stored) == FP8 or self._is_packed(stored)

    def _is_packed(self, stored: str) -> bool:
        return stored.endswith(".weight") and self._folder.dtype(stored) in mxfp4.PACKED


def _scale_name(stored: str) -> str:
    """The tensor with a matrix's scales."""
    return f"{stored.removesuffix('weight')}scale"
