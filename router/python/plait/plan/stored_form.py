"""In which form a GPU holds a checkpoint's matrices, by `quantization_config` and `--quantization`.

It says the same as the worker's plait_worker/weights, which the router may not import; the tests compare both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from plait.errors import ModelNotFoundError, SettingsError
from plait.plan.stated_groups import Scheme
from plait.plan.stated_quantisation import read_stated

NumberFormat = Literal["FP8", "INT4", "MXFP4"]
MULTIPLE = 16
"""Of the inputs and outputs of a matrix, for the kernels."""
_BLOCK = 128
"""Side of the FP8 blocks that stay FP8, and inputs of a chunk of 4-bit codes."""
SUPPORTED = (
    "these are: AWQ (version gemm, 4 bits), GPTQ (4 or 8 bits), compressed-tensors pack-quantized (integers of 4 or 8 "
    "bits) and mxfp4-pack-quantized, FP8 (fp8, compressed-tensors of 8-bit floats, modelopt FP8), and GGUF's: use such "
    "files, or the unquantised model"
)
_FEW_GROUP = (32, 64)
_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How matrices that stay quantised are held."""

    title: NumberFormat
    """As serve's start says it."""
    element_bytes: float
    scale_bytes: int
    """Of the scale of a group, and its zero."""
    group: int | None = None
    """Inputs that share a scale; None: all of an output."""
    block_rows: int = 1
    """Outputs that share it."""
    is_mixed: bool = False
    """Whether groups are of inputs from anywhere (act-order): ranks cannot cut them."""
    ignored: tuple[str, ...] = ()
    """Modules that the files keep in 16 bits, as they write them."""

    def bytes_per_element(self, num_inputs: int) -> float:
        """Scales included; 4-bit codes fill whole chunks of inputs."""
        chunk = 1 if self.title == "FP8" else _BLOCK
        padded = -(-num_inputs // chunk) * chunk / num_inputs
        return self.element_bytes * padded + self.scale_bytes / (self.block_rows * (self.group or num_inputs))

    def takes(self, num_inputs: int) -> bool:
        """Whether the kernels take a matrix of so many inputs."""
        if self.title == "FP8" or self.group is None:
            return num_inputs % MULTIPLE == 0
        return num_inputs % self.group == 0

    def takes_shard(self, num_inputs: int, num_ranks: int) -> bool:
        """Whether each rank can hold its share of the inputs."""
        if num_ranks == 1:
            return self.takes(num_inputs)
        step = self.group or MULTIPLE
        return self.takes(num_inputs) and not self.is_mixed and num_inputs // num_ranks % step == 0

    def keeps(self, module: str) -> bool:
        """Whether the files hold this module quantised."""
        return not any(_names(pattern, module) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Storage:
    """What becomes of a checkpoint's matrices on a GPU."""

    form: StoredForm | None = None
    """None if all are held in 16 bits."""
    upcast: str = ""
    """Which quantised ones are de-quantised, and why; empty if none are."""


def read_storage(config: dict[str, Any], where: str) -> Storage:
    """On a Hopper GPU.

    Raises `ModelNotFoundError` for what serve does not read, and `ValueError` for fields of wrong types.
    """
    if config.get("quantization_config") is None:
        return Storage()
    stated = read_stated(config["quantization_config"])
    scheme = stated.scheme()
    if isinstance(scheme, str):
        raise ModelNotFoundError(f"{where}, quantization_config: quantisation {scheme} is not supported; {SUPPORTED}")
    return _storage(scheme, tuple(stated.ignored()))


def with_fp8(storage: Storage, quantization: str) -> Storage:
    """After `--quantization`; raises `SettingsError` as serve does."""
    if quantization != "fp8" or (storage.form is not None and storage.form.title == "FP8"):
        return storage
    if storage != Storage():
        raise SettingsError(
            "--quantization fp8 takes a folder of 16-bit or FP8 weights: leave it out, or give such files"
        )
    return Storage(StoredForm("FP8", 1, 4))


def on_gpu(storage: Storage, gpu: str, keeps_quantised: bool, quantization: str) -> Storage:
    """On this kind of GPU, after `--quantization`; raises `SettingsError` as serve does."""
    asked = with_fp8(storage, quantization)
    if asked.form is None or keeps_quantised:
        return asked
    if asked != storage:
        raise SettingsError(
            f"--quantization fp8 cannot hold weights in FP8 on a {gpu}: their kernels are for compute capability 9.0; "
            "leave it out"
        )
    return Storage(None, f"{asked.form.title} weights are upcast: their kernels are for compute capability 9.0")


def _storage(scheme: Scheme, ignored: tuple[str, ...]) -> Storage:
    match scheme.kind:
        case "fp8":
            form = StoredForm("FP8", 1, 4)
        case "fp8 blocks":
            form = StoredForm("FP8", 1, 4, _BLOCK, _BLOCK)
        case "mxfp4":
            form = StoredForm("MXFP4", 0.5, 2, _MXFP4_GROUP)
        case "int4" if scheme.group is not None and not _is_taken(scheme.group):
            return Storage(None, f"4 bits in groups of {scheme.group} are upcast: kernels take 32, 64, 128 or all")
        case "int4":
            is_mixed = scheme.is_act_order and scheme.group is not None
            form = StoredForm("INT4", 0.5, 2 + scheme.has_zero, scheme.group, is_mixed=is_mixed)
        case other:
            return Storage(None, f"{other} weights are upcast: no kernels hold such")
    return Storage(replace(form, ignored=ignored))


def _is_taken(group: int) -> bool:
    return group in _FEW_GROUP or group % _BLOCK == 0


def _names(pattern: str, module: str) -> bool:
    """`re:` and GPTQ's `-:` begin a regular expression, ModelOpt writes stars, others name a module or one above it."""
    for prefix in ("re:", "-:"):
        if pattern.startswith(prefix):
            return _matches(pattern.removeprefix(prefix), module)
    return fnmatchcase(module, pattern) if "*" in pattern else f".{pattern}." in f".{module}."


def _matches(expression: str, module: str) -> bool:
    try:
        return re.match(expression, module) is not None
    except (re.error, OverflowError, RecursionError):
        return False
