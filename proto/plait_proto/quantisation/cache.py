"""What ``quantization_config`` states of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait_proto.fields import MAX_SHOWN, Fields

_SCHEME, _ALGORITHM = "kv_cache_scheme", "kv_cache_quant_algo"
_NO_ALGORITHM = ("", "none")


@dataclass(frozen=True, slots=True)
class StatedCache:
    """A quantised cache that a checkpoint asks for."""

    entry: str
    """Its field, with what it says."""
    unsupported: str = ""
    """What of it no kernel has; empty for FP8 with a scale a layer."""
    has_scales: bool = False
    """Whether the files must hold the scales."""


def read_stated_cache(stated: Fields) -> StatedCache | None:
    """compressed-tensors' ``kv_cache_scheme`` or ModelOpt's ``kv_cache_quant_algo``; None without either.

    It raises nothing: a cache in the model's own type needs nothing of it.
    """
    scheme, algorithm = stated.values.get(_SCHEME), stated.values.get(_ALGORITHM)
    if isinstance(scheme, dict):
        return _of_scheme(scheme, is_exact=stated.values.get("quant_method") == "compressed-tensors")
    if isinstance(algorithm, str) and algorithm.lower() not in _NO_ALGORITHM:
        is_fp8 = algorithm.upper() == "FP8"
        return StatedCache(f"{_ALGORITHM} {algorithm[:MAX_SHOWN]}", "" if is_fp8 else "another type than FP8")
    return None


def _of_scheme(scheme: Mapping[str, object], *, is_exact: bool) -> StatedCache:
    """Absent fields mean what compressed-tensors takes for them."""
    kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
    entry = f"{_SCHEME} of {bits}-bit {kind}"[:MAX_SHOWN]
    if (kind, bits) != ("float", 8):
        return StatedCache(entry, "another type than FP8")
    if scheme.get("dynamic", False) is not False:
        return StatedCache(entry, "dynamic scales")
    if scheme.get("strategy", "tensor") not in ("tensor", None):
        return StatedCache(f"{entry}, strategy {scheme['strategy']}"[:MAX_SHOWN], "more scales than one a layer")
    if scheme.get("symmetric", True) is not True:
        return StatedCache(entry, "zero points")
    return StatedCache(entry, has_scales=is_exact)
