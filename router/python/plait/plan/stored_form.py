"""In which form a GPU holds a checkpoint's matrices, by `quantization_config` and `--quantization`.

The entry is read by plait_proto.quantisation, as in the worker. What kernels take of it is said here and in
plait_worker/weights, since the router needs no torch; the tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from plait_proto import UNDECODABLE
from plait_proto.fields import Fields
from plait_proto.quantisation import (
    MODELOPT_FILE,
    MXFP4_GROUP,
    NOTHING_IGNORED,
    AwqConfig,
    Fp8Config,
    GptqConfig,
    IgnoredModules,
    IntegerScheme,
    Mxfp4Config,
    Nvfp4Config,
    PackedConfig,
    QuantisationConfig,
    config_groups,
    ignored_modules,
    read_quantisation_config,
    with_modelopt_file,
)

from plait.errors import ModelNotFoundError, SettingsError

NumberFormat = Literal["FP8", "INT4", "MXFP4"]
MULTIPLE = 16
"""Of the inputs and outputs of a matrix, for the kernels."""
_BLOCK = 128
"""Side of the FP8 blocks that stay FP8, and inputs of a chunk of 4-bit codes."""
_FEW_GROUP = (32, 64)


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
    ignored: IgnoredModules = NOTHING_IGNORED
    """Modules that the files keep in 16 bits."""

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
        return module not in self.ignored


@dataclass(frozen=True, slots=True)
class Storage:
    """What becomes of a checkpoint's matrices on a GPU."""

    form: StoredForm | None = None
    """None if all are held in 16 bits."""
    upcast: str = ""
    """Which quantised ones are de-quantised, and why; empty if none are."""


class _ModelFields(Fields):
    """Those of a `config.json`."""

    error = ModelNotFoundError


def read_storage(config: dict[str, Any], where: str) -> Storage:
    """On a Hopper GPU. Raises `ModelNotFoundError` for what serve does not read, in its words."""
    fields = _ModelFields(config, where)
    if not fields.has("quantization_config"):
        return Storage()
    stated = fields.nested("quantization_config")
    found = read_quantisation_config(stated)
    if found is None:
        return Storage()
    storage = _storage(found)
    if storage.form is None:
        return storage
    ignored = ignored_modules(stated, _wide_targets(stated, found))
    return replace(storage, form=replace(storage.form, ignored=ignored))


def config_fields(config: dict[str, Any], path: Path) -> Fields:
    """Those of a `config.json`, with what ModelOpt's own file beside it states, as serve reads both.

    Raises `ModelNotFoundError` for a file that is no JSON object.
    """
    fields, beside = _ModelFields(config, str(path)), path.with_name(MODELOPT_FILE)
    if not beside.is_file():
        return fields
    try:
        stated = msgspec.json.decode(beside.read_bytes(), type=dict[str, Any])
    except (OSError, *UNDECODABLE) as error:
        raise ModelNotFoundError(f"{beside} is no JSON object ({error}): download it again") from error
    return with_modelopt_file(fields, _ModelFields(stated, str(beside)))


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


def _storage(found: QuantisationConfig) -> Storage:
    match found:
        case Fp8Config(block=block):
            return _floats(block)
        case Mxfp4Config():
            return Storage(StoredForm("MXFP4", 0.5, 2, MXFP4_GROUP))
        case Nvfp4Config():
            return Storage(StoredForm("FP8", 1, 4), "NVFP4 weights are upcast to FP8: no kernels multiply NVFP4")
        case AwqConfig(scheme) | GptqConfig(scheme):
            return _integers(scheme, "8-bit GPTQ")
        case PackedConfig(schemes):
            return _integers(next((each for each in schemes if each.has_codes), schemes[0]), "8-bit integer")


def _floats(block: tuple[int, int] | None) -> Storage:
    if block is None:
        return Storage(StoredForm("FP8", 1, 4))
    if block == (_BLOCK, _BLOCK):
        return Storage(StoredForm("FP8", 1, 4, _BLOCK, _BLOCK))
    return _upcast(f"FP8 blocks of {block[0]} x {block[1]}")


def _integers(scheme: IntegerScheme, wide: str) -> Storage:
    """`wide` names those of 8 bits."""
    if not scheme.has_codes:
        return _upcast(wide)
    if scheme.group_size is not None and not _is_taken(scheme.group_size):
        return Storage(None, f"4 bits in groups of {scheme.group_size} are upcast: kernels take 32, 64, 128 or all")
    zero_bytes = not scheme.is_symmetric
    return Storage(StoredForm("INT4", 0.5, 2 + zero_bytes, scheme.group_size, is_mixed=scheme.mixes_groups))


def _upcast(weights: str) -> Storage:
    return Storage(None, f"{weights} weights are upcast: no kernels hold such")


def _wide_targets(stated: Fields, found: QuantisationConfig) -> Iterator[str]:
    """Modules of 8-bit integers beside others of 4, which are de-quantised."""
    if isinstance(found, PackedConfig):
        groups = zip(config_groups(stated), found.schemes, strict=True)
        yield from (target for group, scheme in groups if not scheme.has_codes for target in group.texts("targets"))


def _is_taken(group: int) -> bool:
    return group in _FEW_GROUP or group % _BLOCK == 0
