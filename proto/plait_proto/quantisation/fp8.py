"""FP8 weights of the method fp8."""

from __future__ import annotations

from plait_proto.fields import Fields
from plait_proto.quantisation.configs import Fp8Config
from plait_proto.quantisation.unsupported import not_supported

_FORMATS = ("e4m3", "float8_e4m3fn")
_MAX_BLOCK = 1 << 16


def read_fp8(stated: Fields) -> Fp8Config:
    """DeepSeek's, MiniMax's and Qwen's blocks; AutoFP8's scale of a tensor."""
    number_format = stated.text("fmt", _FORMATS[0])
    if number_format not in _FORMATS:
        raise not_supported(stated, f"fp8 of format {number_format}")
    is_dynamic = _checked_scheme(stated) == "dynamic"
    if not stated.has("weight_block_size"):
        return Fp8Config("fp8")
    if not is_dynamic:
        raise not_supported(stated, "fp8 with stored scales of activations")
    return Fp8Config("fp8", checked_block(stated, "weight_block_size"))


def checked_block(stated: Fields, name: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    sides = stated.integers(name)
    if len(sides) != 2 or not all(0 < side <= _MAX_BLOCK for side in sides):
        raise stated.value_error(name, f"two whole numbers from 1 to {_MAX_BLOCK}, outputs and inputs of a block")
    return sides[0], sides[1]


def _checked_scheme(stated: Fields) -> str:
    scheme = stated.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise not_supported(stated, f"fp8 with activation_scheme {scheme}")
    return scheme
