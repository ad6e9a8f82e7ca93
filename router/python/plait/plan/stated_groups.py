"""How weights are quantised: the scheme, and compressed-tensors' groups of modules, which state one each."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

CODE_BITS = 4
"""Of integers for which a GPU has kernels."""
INTEGER_BITS = (4, 8)
"""That are read."""
_BLOCK = [128, 128]
_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the quantised matrices are stored."""

    kind: str
    """`fp8`, `fp8 blocks`, `int4`, `mxfp4`; of any other name if a GPU holds none such."""
    group: int | None = None
    """Inputs that share a scale; None: all of an output."""
    has_zero: bool = False
    is_act_order: bool = False


class Weights(msgspec.Struct, frozen=True):
    """compressed-tensors' `weights` of a group."""

    type: str = "int"
    num_bits: int | None = None
    strategy: str = "of no name"
    group_size: int | None = None
    symmetric: bool | None = None
    actorder: bool | str | None = None
    block_structure: list[int] | None = None

    def floats(self) -> Scheme | str:
        """FP8; in words if it is something else."""
        if (self.type, self.num_bits) != ("float", 8) or self.strategy not in ("tensor", "channel", "block"):
            return self._words
        return blocks_scheme(self.block_structure or []) if self.strategy == "block" else Scheme("fp8")

    def integers(self) -> Scheme | str:
        """Of 4 or 8 bits; in words if it is something else. Raises `ValueError` for a size that is none."""
        if self.type != "int" or self.num_bits not in INTEGER_BITS or self.strategy not in ("group", "channel"):
            return self._words
        group = None if self.strategy == "channel" else group_size(self.group_size)
        kind = "int4" if self.num_bits == CODE_BITS else "8-bit integer"
        return Scheme(kind, group, self.symmetric is False, self.actorder in (True, "group"))

    @property
    def is_mxfp4(self) -> bool:
        """OCP's e2m1, 32 of them with a scale."""
        size = self.group_size or _MXFP4_GROUP
        return (self.type, self.num_bits, size) == ("float", CODE_BITS, _MXFP4_GROUP) and self.symmetric is not False

    @property
    def _words(self) -> str:
        return f"compressed-tensors of {self.num_bits or 0}-bit {self.type} weights, strategy {self.strategy[:20]}"


class Group(msgspec.Struct, frozen=True):
    """Modules that are quantised alike."""

    weights: Weights = Weights()
    targets: list[str] | None = None
    input_activations: object = None


def group_size(stated: int | None) -> int | None:
    """Files write -1 for all inputs of an output; raises `ValueError` for no size."""
    if stated is None or (stated < 1 and stated != -1):
        raise ValueError(f"quantization_config: group_size is {stated}, but must be -1 or a whole number over 0")
    return None if stated == -1 else stated


def blocks_scheme(sides: list[int]) -> Scheme:
    """A GPU holds FP8 in one size of blocks."""
    return Scheme("fp8 blocks" if sides == _BLOCK else f"FP8 blocks of {' x '.join(map(str, sides))}")
