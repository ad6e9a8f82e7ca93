"""What ``quantization_config`` of a ``config.json`` says of FP8 weights, in the three dialects that files come in."""

from __future__ import annotations

from dataclasses import dataclass

from plait_worker.weights.fields import Fields
from plait_worker.weights.formats.fp8_blocks import Fp8Blocks
from plait_worker.weights.packed.layout import not_supported

_FORMATS = ("e4m3", "float8_e4m3fn")
_COMPRESSED = ("float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "block")
_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the scales of FP8 weights are stored."""

    ending: str
    """What follows a weight's name in that of its scales."""
    blocks: Fp8Blocks | None
    """None if a scale is for a whole matrix or for each output."""

    def scale_name(self, weight_name: str) -> str:
        """The tensor with a weight's scales."""
        return weight_name + self.ending


def read_fp8(stated: Fields) -> Fp8Scheme:
    """DeepSeek's, MiniMax's and Qwen's blocks; AutoFP8's scale of a tensor.

    Raises ``ModelFilesError``, as the others here do, for what is not read.
    """
    number_format, sides = stated.text("fmt", _FORMATS[0]), stated.integers("weight_block_size")
    if number_format not in _FORMATS:
        raise not_supported(stated, f"fp8 of format {number_format}")
    is_dynamic = _checked_scheme(stated) == "dynamic"
    if not stated.has("weight_block_size"):
        return Fp8Scheme("_scale", None)
    if not is_dynamic:
        raise not_supported(stated, "fp8 with stored scales of activations")
    return Fp8Scheme("_scale_inv", _blocks(stated, sides, "weight_block_size"))


def _checked_scheme(stated: Fields) -> str:
    scheme = stated.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise not_supported(stated, f"fp8 with activation_scheme {scheme}")
    return scheme


def read_compressed_fp8(stated: Fields) -> Fp8Scheme:
    """compressed-tensors' 8-bit floats."""
    groups = stated.nested("config_groups")
    stored = stated.text("format", _COMPRESSED[0])
    if stored not in _COMPRESSED or len(groups.values) != 1:
        raise not_supported(stated, f"compressed-tensors of format {stored} in {len(groups.values)} groups")
    weights = groups.nested(next(iter(groups.values))).nested("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 0, 0)
    strategy = weights.text("strategy", "of no name")
    if (kind, bits) != ("float", 8) or strategy not in _STRATEGIES:
        raise not_supported(stated, f"compressed-tensors of {bits}-bit {kind} weights, strategy {strategy}")
    if strategy != "block":
        return Fp8Scheme("_scale", None)
    return Fp8Scheme("_scale", _blocks(stated, weights.integers("block_structure"), "block_structure"))


def read_modelopt(stated: Fields) -> Fp8Scheme:
    """ModelOpt's FP8."""
    algorithm = stated.text("quant_algo", "of no name")
    if algorithm != "FP8":
        raise not_supported(stated, f"modelopt {algorithm}")
    return Fp8Scheme("_scale", None)


def _blocks(stated: Fields, sides: list[int], name: str) -> Fp8Blocks:
    if len(sides) != 2 or not all(0 < side <= _MAX_BLOCK for side in sides):
        raise not_supported(stated, f"fp8 with {name} {sides or 'absent'}")
    return Fp8Blocks(*sides)
