"""The methods that are read, and what each states."""

from __future__ import annotations

from dataclasses import dataclass

CODE_BITS = 4
"""Of integers for which a GPU has kernels."""
INTEGER_BITS = (4, 8)
"""That are read."""
MXFP4_GROUP = 32
"""Inputs that share a scale."""
NVFP4_GROUP = 16
"""The same."""


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """8-bit floats of any method."""

    method: str
    """The ``quant_method``."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None if a scale is for a whole matrix or for each output."""


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """Integers with a scale for each group of inputs."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None for all of an output."""
    is_symmetric: bool
    is_act_order: bool = False
    """Whether inputs were quantised, and so grouped, in another order than they have."""

    @property
    def has_codes(self) -> bool:
        """Whether GPU kernels multiply integers of so many bits."""
        return self.bits == CODE_BITS

    @property
    def mixes_groups(self) -> bool:
        """Whether groups are of inputs from anywhere: one group of all inputs has no order."""
        return self.is_act_order and self.group_size is not None


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """AWQ's version gemm."""

    scheme: IntegerScheme


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """GPTQ."""

    scheme: IntegerScheme
    checkpoint_format: str
    """gptq or gptq_v2."""


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """compressed-tensors' integers."""

    schemes: tuple[IntegerScheme, ...]
    """Of each of ``config_groups``."""


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """compressed-tensors' e2m1 floats, in groups of ``MXFP4_GROUP``."""


@dataclass(frozen=True, slots=True)
class Nvfp4Config:
    """e2m1 floats in groups of ``NVFP4_GROUP``, of compressed-tensors or ModelOpt."""

    method: str
    """The ``quant_method``."""


QuantisationConfig = Fp8Config | AwqConfig | GptqConfig | PackedConfig | Mxfp4Config | Nvfp4Config
