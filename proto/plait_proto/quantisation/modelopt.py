"""ModelOpt: one algorithm for all modules that are quantised."""

from __future__ import annotations

from typing import TypeVar

from plait_proto.fields import Fields
from plait_proto.quantisation.configs import NVFP4_GROUP, Fp8Config, Nvfp4Config
from plait_proto.quantisation.unsupported import not_supported

AnyFields = TypeVar("AnyFields", bound=Fields)
METHOD = "modelopt"
FILE = "hf_quant_config.json"
"""Of ModelOpt's own, beside config.json; older checkpoints state their quantisation there alone."""


def with_modelopt_file(config: AnyFields, beside: AnyFields) -> AnyFields:
    """The fields of config.json, and what ``FILE`` states where that states nothing."""
    if config.has("quantization_config"):
        return config
    stated = {"quant_method": METHOD} | dict(beside.nested("quantization").values)
    return type(config)({**config.values, "quantization_config": stated}, f"{config.where} and {FILE}")


def read_modelopt(stated: Fields) -> Fp8Config | Nvfp4Config | None:
    """By ``quant_algo``."""
    if stated.has("kv_cache_quant_algo") and not stated.has("quant_algo"):
        return None
    algorithm = stated.text("quant_algo", "of no name")
    if algorithm == "FP8":
        return Fp8Config(METHOD)
    if algorithm != "NVFP4":
        raise not_supported(stated, f"{METHOD} {algorithm}")
    if (size := stated.integer("group_size", NVFP4_GROUP)) != NVFP4_GROUP:
        raise not_supported(stated, f"{METHOD} {algorithm} in groups of {size}")
    return Nvfp4Config(METHOD)
