"""What ``quantization_config`` of a ``config.json`` says, whatever the method."""

from __future__ import annotations

from plait_proto.quantisation import (
    AwqConfig,
    Fp8Config,
    GptqConfig,
    IgnoredModules,
    Mxfp4Config,
    Nvfp4Config,
    PackedConfig,
    StatedCache,
    ignored_modules,
    read_quantisation_config,
    read_stated_cache,
)

from plait_worker.errors import ModelFilesError
from plait_worker.weights.fields import Fields
from plait_worker.weights.fp8_config import Fp8Scheme, fp8_scheme
from plait_worker.weights.packed.awq import Awq
from plait_worker.weights.packed.compressed import PackQuantized, distinct
from plait_worker.weights.packed.gptq import Gptq
from plait_worker.weights.packed.layout import PackedLayout
from plait_worker.weights.packed.mxfp4 import PackedMxfp4
from plait_worker.weights.packed.nvfp4 import nvfp4_layout


def read_quantisation(fields: Fields) -> Fp8Scheme | PackedLayout | None:
    """How the file says that weights are stored; None if they are not quantised.

    Raises ``ModelFilesError`` for any quantisation that is not read, by name.
    """
    if not fields.has("quantization_config"):
        return None
    stated = fields.nested("quantization_config")
    config = read_quantisation_config(stated)
    if config is None:
        return None
    if isinstance(config, Fp8Config):
        return fp8_scheme(config, ignored_modules(stated))
    return _packed_layout(config, ignored_modules(stated))


def check_not_ignored(tensor: str, module: str, ignored: IgnoredModules) -> None:
    """Raise ``ModelFilesError`` for a quantised tensor of a module that the file says is not quantised."""
    if module in ignored:
        raise ModelFilesError(
            f"tensor {tensor} is quantised, but quantization_config says that {module} is not: the files do not belong "
            "together; download the model again"
        )


def stated_cache(fields: Fields) -> StatedCache | None:
    """What the file says of the KV cache."""
    return read_stated_cache(fields.nested("quantization_config"))


def _packed_layout(
    config: AwqConfig | GptqConfig | PackedConfig | Mxfp4Config | Nvfp4Config, ignored: IgnoredModules
) -> PackedLayout:
    match config:
        case AwqConfig(scheme):
            return Awq(scheme, ignored)
        case GptqConfig(scheme, checkpoint_format):
            return Gptq(scheme, checkpoint_format, ignored)
        case PackedConfig(schemes):
            return PackQuantized(distinct(schemes), ignored)
        case Mxfp4Config():
            return PackedMxfp4(ignored)
        case Nvfp4Config(method):
            return nvfp4_layout(method, ignored)
