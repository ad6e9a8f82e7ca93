"""What `quantization_config` of a `config.json` states: a struct for each method, in which a null counts as absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import msgspec

from plait.plan.stated_groups import CODE_BITS, INTEGER_BITS, Group, Scheme, blocks_scheme, group_size

_FP8 = ("e4m3", "float8_e4m3fn")
_FLOATS = ("float-quantized", "naive-quantized")
_PACKED = ("pack-quantized", "mixed-precision")


class Stated(Protocol):
    """The fields of one method."""

    def scheme(self) -> Scheme | str:
        """What it is; in words if serve does not read it. Raises `ValueError` for sizes that are none."""
        ...

    def ignored(self) -> Iterable[str]:
        """Modules in 16 bits."""
        ...


class _Fp8(msgspec.Struct, frozen=True):
    fmt: str | None = None
    weight_block_size: list[int] | None = None
    activation_scheme: str | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    def scheme(self) -> Scheme | str:
        activations = self.activation_scheme or "dynamic"
        if (self.fmt or _FP8[0]) not in _FP8:
            return f"fp8 of format {self.fmt}"
        if activations not in ("dynamic", "static"):
            return f"fp8 with activation_scheme {activations}"
        if self.weight_block_size is None:
            return Scheme("fp8")
        is_static = activations == "static"
        return "fp8 with stored scales of activations" if is_static else blocks_scheme(self.weight_block_size)

    def ignored(self) -> Iterable[str]:
        return (*(self.modules_to_not_convert or ()), *(self.ignored_layers or ()))


class _ModelOpt(msgspec.Struct, frozen=True):
    quant_algo: str | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None

    def scheme(self) -> Scheme | str:
        return Scheme("fp8") if self.quant_algo == "FP8" else f"modelopt {self.quant_algo or 'of no name'}"

    def ignored(self) -> Iterable[str]:
        return (*(self.exclude_modules or ()), *(self.ignore or ()))


class _Awq(msgspec.Struct, frozen=True):
    version: str | None = None
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool | None = None
    modules_to_not_convert: list[str] | None = None

    def scheme(self) -> Scheme | str:
        version, bits = self.version or "gemm", self.bits if self.w_bit is None else self.w_bit
        if version.lower() != "gemm" or bits != CODE_BITS:
            return f"awq of version {version[:20]} with {bits} bits"
        if self.zero_point is False:
            return "awq with zero_point false"
        size = self.group_size if self.q_group_size is None else self.q_group_size
        return Scheme("int4", group_size(size), has_zero=True)

    def ignored(self) -> Iterable[str]:
        return self.modules_to_not_convert or ()


class _Gptq(msgspec.Struct, frozen=True):
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    checkpoint_format: str | None = None
    is_marlin_format: bool | None = None
    dynamic: dict[str, object] | None = None
    modules_to_not_convert: list[str] | None = None

    def scheme(self) -> Scheme | str:
        stored_as = self.checkpoint_format or "gptq"
        if self.bits not in INTEGER_BITS:
            return f"gptq with {self.bits} bits"
        if stored_as not in ("gptq", "gptq_v2") or self.is_marlin_format:
            return f"gptq of checkpoint_format {stored_as[:20]}"
        if any(not rule.startswith("-") for rule in self.dynamic or ()):
            return "gptq with other schemes for some layers (dynamic)"
        kind = "int4" if self.bits == CODE_BITS else "8-bit GPTQ"
        return Scheme(kind, group_size(self.group_size), self.sym is False, bool(self.desc_act))

    def ignored(self) -> Iterable[str]:
        return (*(self.modules_to_not_convert or ()), *(self.dynamic or ()))


class _Compressed(msgspec.Struct, frozen=True):
    format: str | None = None
    config_groups: dict[str, Group] | None = None
    ignore: list[str] | None = None

    def scheme(self) -> Scheme | str:
        groups = self._groups()
        if self.format == "mxfp4-pack-quantized":
            return _mxfp4(groups)
        if self.format in _PACKED:
            return _integers(groups)
        if (self.format or _FLOATS[0]) not in _FLOATS or len(groups) != 1:
            return f"compressed-tensors of format {self.format} in {len(groups)} groups"
        return groups[0].weights.floats()

    def ignored(self) -> Iterable[str]:
        """And modules of 8-bit integers beside others of 4, which are de-quantised."""
        is_mixed = any(group.weights.num_bits == CODE_BITS for group in self._groups())
        wide = [group for group in self._groups() if is_mixed and group.weights.num_bits != CODE_BITS]
        return (*(self.ignore or ()), *(target for group in wide for target in group.targets or ()))

    def _groups(self) -> list[Group]:
        return list((self.config_groups or {}).values())


@dataclass(frozen=True, slots=True)
class _Unknown:
    method: str

    def scheme(self) -> str:
        return self.method

    def ignored(self) -> Iterable[str]:
        return ()


class _Method(msgspec.Struct, frozen=True):
    quant_method: str = "of no name"


_METHODS: Mapping[str, type[_Fp8 | _ModelOpt | _Awq | _Gptq | _Compressed]] = MappingProxyType(
    {"fp8": _Fp8, "modelopt": _ModelOpt, "awq": _Awq, "gptq": _Gptq, "compressed-tensors": _Compressed}
)


def read_stated(entry: object) -> Stated:
    """Of an entry; raises `ValueError` for fields of wrong types."""
    method = msgspec.convert(entry, type=_Method).quant_method
    known = _METHODS.get(method)
    return _Unknown(method) if known is None else msgspec.convert(entry, type=known)


def _mxfp4(groups: list[Group]) -> Scheme | str:
    for weights in (group.weights for group in groups):
        if not weights.is_mxfp4:
            size = f"{weights.num_bits or 0}-bit {weights.type} weights in groups of {weights.group_size}"
            return f"mxfp4-pack-quantized of {size}"
    return Scheme("mxfp4")


def _integers(groups: list[Group]) -> Scheme | str:
    """The 4-bit ones, if there are several."""
    if not groups:
        return "compressed-tensors in 0 groups"
    if any(group.input_activations is not None for group in groups):
        return "compressed-tensors of integer weights with quantised activations"
    schemes = [group.weights.integers() for group in groups]
    wrong = (each for each in schemes if isinstance(each, str))
    codes = (each for each in schemes if isinstance(each, Scheme) and each.kind == "int4")
    return next(wrong, None) or next(codes, schemes[0])
