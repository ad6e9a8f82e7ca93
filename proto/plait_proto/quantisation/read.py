"""The one list of methods: how each is read, and which modules it leaves in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from plait_proto.fields import Fields
from plait_proto.quantisation.compressed_tensors import METHOD as COMPRESSED_TENSORS
from plait_proto.quantisation.compressed_tensors import read_compressed_tensors
from plait_proto.quantisation.configs import QuantisationConfig
from plait_proto.quantisation.fp8 import read_fp8
from plait_proto.quantisation.ignored import IgnoredModules, read_ignored
from plait_proto.quantisation.integers import read_awq, read_gptq
from plait_proto.quantisation.modelopt import METHOD as MODELOPT
from plait_proto.quantisation.modelopt import read_modelopt
from plait_proto.quantisation.unsupported import not_supported


@dataclass(frozen=True, slots=True)
class _Method:
    read: Callable[[Fields], QuantisationConfig | None]
    ignored: tuple[str, ...]
    """Fields that name modules which are not quantised."""


_METHODS: Mapping[str, _Method] = MappingProxyType(
    {
        "fp8": _Method(read_fp8, ("modules_to_not_convert", "ignored_layers")),
        MODELOPT: _Method(read_modelopt, ("exclude_modules", "ignore")),
        COMPRESSED_TENSORS: _Method(read_compressed_tensors, ("ignore",)),
        "awq": _Method(read_awq, ("modules_to_not_convert",)),
        "gptq": _Method(read_gptq, ("modules_to_not_convert",)),
    }
)


def read_quantisation_config(stated: Fields) -> QuantisationConfig | None:
    """What its fields say; None if they quantise only the cache.

    Raises ``stated.error`` for any quantisation that is not read, by name.
    """
    return _method(stated).read(stated)


def ignored_modules(stated: Fields, more: Iterable[str] = ()) -> IgnoredModules:
    """Modules that are not quantised, and ``more`` patterns; GPTQ's ``dynamic`` has rules ``-:`` for them."""
    method = _method(stated)
    rules = stated.nested("dynamic").values if method.read is read_gptq else ()
    patterns = (*(module for name in method.ignored for module in stated.texts(name)), *rules, *more)
    return read_ignored(stated, patterns, is_exact=method.read is read_compressed_tensors)


def _method(stated: Fields) -> _Method:
    name = stated.text("quant_method", "of no name")
    if (method := _METHODS.get(name.lower())) is None:
        raise not_supported(stated, name)
    return method
