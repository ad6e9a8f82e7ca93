"""What ``quantization_config`` of a ``config.json`` states: workers read tensors by it, ``plait plan`` counts bytes."""

from plait_proto.quantisation.cache import StatedCache, read_stated_cache
from plait_proto.quantisation.compressed_tensors import config_groups
from plait_proto.quantisation.configs import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    AwqConfig,
    Fp8Config,
    GptqConfig,
    IntegerScheme,
    Mxfp4Config,
    Nvfp4Config,
    PackedConfig,
    QuantisationConfig,
)
from plait_proto.quantisation.ignored import NOTHING_IGNORED, IgnoredModules
from plait_proto.quantisation.modelopt import FILE as MODELOPT_FILE
from plait_proto.quantisation.modelopt import with_modelopt_file
from plait_proto.quantisation.read import ignored_modules, read_quantisation_config

__all__ = [
    "MODELOPT_FILE",
    "MXFP4_GROUP",
    "NOTHING_IGNORED",
    "NVFP4_GROUP",
    "AwqConfig",
    "Fp8Config",
    "GptqConfig",
    "IgnoredModules",
    "IntegerScheme",
    "Mxfp4Config",
    "Nvfp4Config",
    "PackedConfig",
    "QuantisationConfig",
    "StatedCache",
    "config_groups",
    "ignored_modules",
    "read_quantisation_config",
    "read_stated_cache",
    "with_modelopt_file",
]
