"""The rotary embedding of ``config.json``, in its new spelling (``rope_parameters``) and its old one."""

from __future__ import annotations

import math

from plait_worker.errors import ModelFilesError
from plait_worker.model_config import LinearRope, Llama3Rope, RopeConfig, RopeScaling, YarnRope
from plait_worker.weights.fields import Fields

DEFAULT_THETA = 10000.0
LEAST_THETA = 1.0
"""At or below it the frequencies would not decrease."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Fields, rotary_dim: int | None = None) -> tuple[RopeConfig, int]:
    """The embedding, and the longest context that it was trained for.

    ``rotary_dim`` is from ``read_rotary_dim`` for families with partial rope, else None.
    Raises ``ModelFilesError`` for a type that is not supported.
    """
    rope = _rope(fields)
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA, LEAST_THETA), LEAST_THETA)
    max_positions = fields.integer("max_position_embeddings", 2048)
    if rotary_dim is None and _rotary_factor(fields) not in (None, 1.0):
        raise ModelFilesError(f"{fields.where}: rope over a part of each head is not supported in this architecture")
    scaling = _read_scaling(rope, fields.integer("original_max_position_embeddings", max_positions))
    if isinstance(scaling, YarnRope):
        max_positions = max(max_positions, int(scaling.original_max_positions * scaling.factor))
    return RopeConfig(theta, scaling, rotary_dim), max_positions


def read_rotary_dim(fields: Fields, head_dim: int) -> int:
    """Elements of a head that rope rotates: by ``partial_rotary_factor``, or ``rotary_dim`` in older files.

    A factor's result is rounded down, as in transformers. Raises ``ModelFilesError`` if it is odd or too large.
    """
    share = _rotary_factor(fields)
    if share is None:
        share = fields.integer("rotary_dim") / head_dim if fields.has("rotary_dim") else 1.0
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelFilesError(
            f"{fields.where}: rope over {rotary_dim} of {head_dim} elements of a head is not supported; give an even "
            "number up to the head dimension"
        )
    return rotary_dim


def _rotary_factor(fields: Fields) -> float | None:
    """``partial_rotary_factor``, among rope's settings or at the top level; None if it is absent."""
    for stated in (_rope(fields), fields):
        if stated.has("partial_rotary_factor"):
            return stated.number("partial_rotary_factor")
    return None


def _rope(fields: Fields) -> Fields:
    return fields.nested("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _read_scaling(rope: Fields, original_default: int) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = rope.integer("original_max_position_embeddings", original_default)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise rope.value_error("high_freq_factor", f"more than low_freq_factor, {low:g}")
            return Llama3Rope(rope.number("factor"), low, high, original)
        case "yarn":
            return _read_yarn(rope, original)
    raise ModelFilesError(f"{rope.where}: rope type {kind} is not supported; these are: {', '.join(ROPE_TYPES)}")


def _read_yarn(rope: Fields, original: int) -> YarnRope:
    factor = rope.number("factor")
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        score_temperature=yarn_temperature(factor, _read_mscale(rope, "mscale_all_dim")),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The paper's temperature, or the ratio of two if the file states both."""
    mscale, mscale_all_dim = _read_mscale(rope, "mscale"), _read_mscale(rope, "mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return yarn_temperature(factor)


def _read_mscale(rope: Fields, name: str) -> float:
    """A factor of YaRN's temperature; absent and 0 mean none."""
    return rope.number(name) if rope.values.get(name) else 0.0


def yarn_temperature(factor: float, strength: float = 1.0) -> float:
    """``0.1 strength ln(factor) + 1`` (arXiv 2309.00071, equation 22); 1 without scaling."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
