"""Packed integers of AWQ and GPTQ."""

from __future__ import annotations

from plait_proto.fields import Fields
from plait_proto.quantisation.configs import CODE_BITS, INTEGER_BITS, AwqConfig, GptqConfig, IntegerScheme
from plait_proto.quantisation.unsupported import not_supported

_CHECKPOINT_FORMATS = ("gptq", "gptq_v2")


def read_awq(stated: Fields) -> AwqConfig:
    """AutoAWQ's names of the fields, or llm-awq's."""
    version = stated.text("version", "gemm")
    bits = stated.integer("w_bit" if stated.has("w_bit") else "bits", low=0)
    if version.lower() != "gemm" or bits != CODE_BITS:
        raise not_supported(stated, f"awq of version {version} with {bits} bits")
    if not stated.boolean("zero_point", True):
        raise not_supported(stated, "awq with zero_point false")
    size = "q_group_size" if stated.has("q_group_size") else "group_size"
    return AwqConfig(IntegerScheme(bits, read_group_size(stated, size), is_symmetric=False))


def read_gptq(stated: Fields) -> GptqConfig:
    """One scheme for all layers that are quantised."""
    bits, stored_as = stated.integer("bits", low=0), stated.text("checkpoint_format", "gptq")
    if bits not in INTEGER_BITS:
        raise not_supported(stated, f"gptq with {bits} bits")
    if stored_as not in _CHECKPOINT_FORMATS or stated.boolean("is_marlin_format", False):
        raise not_supported(stated, f"gptq of checkpoint_format {stored_as}")
    if any(not rule.startswith("-") for rule in stated.nested("dynamic").values):
        raise not_supported(stated, "gptq with other schemes for some layers (dynamic)")
    size = read_group_size(stated, "group_size")
    return GptqConfig(
        IntegerScheme(bits, size, stated.boolean("sym", True), stated.boolean("desc_act", False)), stored_as
    )


def read_group_size(stated: Fields, name: str) -> int | None:
    """Inputs that share a scale; None for all of an output, which files write as -1."""
    if stated.values.get(name) == -1:
        return None
    return stated.integer(name, other="-1")
