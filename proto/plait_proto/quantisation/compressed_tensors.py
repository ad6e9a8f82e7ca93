"""compressed-tensors: groups of modules, each with a scheme."""

from __future__ import annotations

from collections.abc import Iterator

from plait_proto.fields import Fields
from plait_proto.quantisation.configs import (
    INTEGER_BITS,
    MXFP4_GROUP,
    NVFP4_GROUP,
    Fp8Config,
    IntegerScheme,
    Mxfp4Config,
    Nvfp4Config,
    PackedConfig,
)
from plait_proto.quantisation.fp8 import checked_block
from plait_proto.quantisation.integers import read_group_size
from plait_proto.quantisation.unsupported import not_supported

METHOD = "compressed-tensors"
_MXFP4, _NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_PACKED, _MIXED = "pack-quantized", "mixed-precision"
_FLOATS = ("float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "block")
_ACT_ORDERS = (None, False, True, "group", "weight", "static")
_MIXING = (True, "group")
"""Those of which groups are of inputs from anywhere."""
_MAX_SCHEMES = 64


def read_compressed_tensors(stated: Fields) -> Fp8Config | PackedConfig | Mxfp4Config | Nvfp4Config | None:
    """By ``format``; activations of 4-bit floats are not rounded, whatever it says of them."""
    stored = stated.text("format", _FLOATS[0])
    if stated.has("kv_cache_scheme") and not _num_groups(stated):
        return None
    if stored == _MXFP4:
        _check_float4(stated, stored, MXFP4_GROUP)
        return Mxfp4Config()
    if stored == _NVFP4:
        _check_float4(stated, stored, NVFP4_GROUP)
        return Nvfp4Config(METHOD)
    return _read_integers(stated) if stored in (_PACKED, _MIXED) else _read_floats(stated, stored)


def config_groups(stated: Fields) -> Iterator[Fields]:
    """The groups, in the order of ``PackedConfig.schemes``."""
    groups = stated.nested("config_groups")
    return (groups.nested(name) for name in groups.values)


def _num_groups(stated: Fields) -> int:
    return len(stated.nested("config_groups").values)


def _read_floats(stated: Fields, stored: str) -> Fp8Config:
    if stored not in _FLOATS or _num_groups(stated) != 1:
        raise not_supported(stated, f"{METHOD} of format {stored} in {_num_groups(stated)} groups")
    weights = next(config_groups(stated)).nested("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 0, 0)
    strategy = weights.text("strategy", "of no name")
    if (kind, bits) != ("float", 8) or strategy not in _STRATEGIES:
        raise not_supported(stated, f"{METHOD} of {bits}-bit {kind} weights, strategy {strategy}")
    if strategy != "block":
        return Fp8Config(METHOD)
    return Fp8Config(METHOD, checked_block(weights, "block_structure"))


def _read_integers(stated: Fields) -> PackedConfig:
    if not 0 < _num_groups(stated) <= _MAX_SCHEMES:
        raise not_supported(stated, f"{METHOD} in {_num_groups(stated)} groups")
    return PackedConfig(tuple(_read_scheme(stated, group) for group in config_groups(stated)))


def _read_scheme(stated: Fields, group: Fields) -> IntegerScheme:
    if group.text("format", _PACKED) != _PACKED:
        raise not_supported(stated, f"{METHOD} with a group of format {group.text('format')}")
    if group.has("input_activations"):
        raise not_supported(stated, f"{METHOD} of integer weights with quantised activations")
    weights = group.nested("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 0, 0)
    strategy, order = weights.text("strategy", "of no name"), weights.values.get("actorder")
    if kind != "int" or bits not in INTEGER_BITS or strategy not in ("group", "channel"):
        raise not_supported(stated, f"{METHOD} of {bits}-bit {kind} weights, strategy {strategy}")
    if order not in _ACT_ORDERS:
        raise not_supported(stated, f"{METHOD} with actorder {order}")
    size = None if strategy == "channel" else read_group_size(weights, "group_size")
    return IntegerScheme(bits, size, weights.boolean("symmetric", True), order in _MIXING)


def _check_float4(stated: Fields, stored: str, group: int) -> None:
    for weights in (each.nested("weights") for each in config_groups(stated)):
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 0, 0)
        size = weights.integer("group_size", group)
        if (kind, bits, size) != ("float", 4, group) or not weights.boolean("symmetric", True):
            raise not_supported(stated, f"{stored} of {bits}-bit {kind} weights in groups of {size}")
