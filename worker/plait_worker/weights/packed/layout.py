"""What the layouts of packed matrices share: how a folder asks them, and the checks of what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from plait_kernels.linear.int4 import MULTIPLE, num_bytes, takes_groups
from plait_proto.quantisation import IgnoredModules, IntegerScheme
from torch import Tensor

from plait_worker.errors import ModelFilesError
from plait_worker.weights.packed.integers import BLOCK, ScaledIntegers, block_kind

WORD_BITS = 32
INT32 = ("I32",)
_SCALES = ("F16", "BF16", "F32")
_MAX_SCALE = 65504.0
"""float16's largest."""
_HALF_ERROR = 2.0**-11
"""A number's share that rounding to float16 changes at most, if it is no subnormal."""


@dataclass(frozen=True, slots=True)
class Int4Form:
    """How a matrix of 4-bit codes is scaled, told from the headers."""

    group_size: int | None
    """None for all inputs."""
    has_zero: bool
    is_mixed: bool = False
    """Whether groups are of inputs from anywhere (act-order)."""
    is_float: bool = False
    """Whether codes are e2m1 floats."""

    def num_bytes(self, shape: tuple[int, int]) -> int | None:
        """What the matrix takes at least; None if the kernels do not take it."""
        size = self.group_size or shape[1]
        if shape[0] % MULTIPLE or not takes_groups(shape[1], size):
            return None
        return num_bytes(shape, size, scale_bytes=2, has_zero=self.has_zero)


class StoredTensors(Protocol):
    """A folder's tensors as they are stored."""

    def holds(self, name: str) -> bool:
        """Whether a tensor is there."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        ...

    def dtype(self, name: str) -> str:
        """As safetensors calls it."""
        ...

    def read_as_stored(self, name: str, types: tuple[str, ...]) -> Tensor:
        """A view of the mapped file; raises ``ModelFilesError`` for another type."""
        ...


class PackedLayout(Protocol):
    """How one method stores the matrix of a module: under which names, and what its bits mean."""

    @property
    def title(self) -> str:
        """In words, for the log and errors."""
        ...

    @property
    def ignored(self) -> IgnoredModules:
        """Modules that the configuration says are not quantised."""
        ...

    @property
    def packed(self) -> str:
        """What follows a module's name in that of its integers."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """What follows it in the names of all that belongs to them."""
        ...

    def shape(self, stored: StoredTensors, module: str) -> tuple[int, int]:
        """Outputs and inputs; raises ``ModelFilesError``."""
        ...

    def block_kind(self, stored: StoredTensors, module: str) -> str | None:
        """The GGUF blocks that hold the matrix exactly, from the headers; None if none do."""
        ...

    def int4_form(self, stored: StoredTensors, module: str) -> Int4Form | None:
        """How the codes are scaled; None if they have not 4 bits."""
        ...

    def has_half_scales(self, stored: StoredTensors, module: str) -> bool:
        """Whether float16 has all scales to its 11 bits: smaller ones lose some there, or become 0."""
        ...

    def read(self, stored: StoredTensors, module: str) -> ScaledIntegers:
        """The matrix; raises ``ModelFilesError`` if its tensors do not fit each other or the configuration."""
        ...

    def check_values(self, stored: StoredTensors, modules: Sequence[str]) -> None:
        """Raise ``ModelFilesError`` if the matrices' shapes or values show that the configuration is wrong."""
        ...


def sides(stored: StoredTensors, name: str) -> tuple[int, int]:
    """Of a tensor that must be a matrix."""
    shape = stored.shape(name)
    if len(shape) != 2 or not all(shape):
        raise ModelFilesError(f"tensor {name} has shape {list(shape)}, but must be a matrix: download the model again")
    return shape[0], shape[1]


def check_bits(stored: StoredTensors, module: str, title: str, zeros_and_scales: tuple[int, int]) -> None:
    """Raise ``ModelFilesError`` if AWQ's or GPTQ's zeros and scales have other columns than the integers ask for.

    They have if the files are of another method or of other bits than ``title``. What is no matrix is refused as it is
    read.
    """
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    shapes = [stored.shape(name) if stored.holds(name) else () for name in names]
    if any(len(shape) == 2 and shape[1] != width for shape, width in zip(shapes[1:], zeros_and_scales, strict=True)):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
        raise ModelFilesError(
            f"the shapes of tensors {found} are not those of {title}, which quantization_config says: the files do not "
            "belong together; correct quant_method or bits there, or download the model again"
        )


def read_fitting(
    stored: StoredTensors, name: str, shape: tuple[int, ...], types: tuple[str, ...] = INT32, field: str | None = None
) -> Tensor:
    """A tensor that must be there in this shape, which follows from a ``field`` of quantization_config."""
    if not stored.holds(name):
        raise ModelFilesError(f"the model files lack the tensor {name}: download them again")
    found = stored.shape(name)
    if found != shape:
        raise ModelFilesError(
            f"tensor {name} has shape {list(found)}, but quantization_config asks for {list(shape)}: the files do not "
            f"belong together; {'' if field is None else f'correct {field} there, or '}download the model again"
        )
    return stored.read_as_stored(name, types)


def read_scales(stored: StoredTensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """float32, all of them numbers that float16 can hold."""
    scale = read_fitting(stored, name, shape, _SCALES, field="group_size").float()
    if not (torch.isfinite(scale).all() and scale.abs().max() <= _MAX_SCALE):
        raise ModelFilesError(
            f"tensor {name} holds a scale that is no number or above {_MAX_SCALE:,.0f}: download the model again"
        )
    return scale


def are_halves(stored: StoredTensors, name: str) -> bool:
    """Whether float16 has a tensor's scales to its 11 bits."""
    if not stored.holds(name) or stored.dtype(name) == "F16":
        return True
    exact = stored.read_as_stored(name, _SCALES).float()
    return bool(((exact.half().float() - exact).abs() <= exact.abs() * _HALF_ERROR).all())


def read_order(stored: StoredTensors, name: str, num_inputs: int, num_groups: int) -> Tensor | None:
    """The group of each input; None if groups are runs of one length."""
    group_I = read_fitting(stored, name, (num_inputs,)).long()
    if not 0 <= int(group_I.min()) <= int(group_I.max()) < num_groups:
        raise ModelFilesError(
            f"tensor {name} names groups {int(group_I.min())} to {int(group_I.max())}, but there are {num_groups}: "
            "download the model again"
        )
    in_order = torch.arange(num_inputs) // (num_inputs // num_groups)
    return None if torch.equal(group_I, in_order) else group_I


def num_groups(name: str, num_inputs: int, group_size: int | None) -> int:
    """Of each output."""
    if group_size is not None and num_inputs % group_size:
        raise ModelFilesError(
            f"{name} has {num_inputs} inputs, which groups of {group_size} do not divide: quantise it with groups that "
            "do (32, 64 or 128), or with one a row (-1)"
        )
    return 1 if group_size is None else num_inputs // group_size


def blocks_for(scheme: IntegerScheme, num_inputs: int) -> str | None:
    """The blocks that hold such a matrix if its groups are runs; None if a block would have two scales."""
    run = num_inputs if scheme.group_size is None else scheme.group_size
    return None if run % BLOCK else block_kind(scheme.bits, is_symmetric=scheme.is_symmetric)


def int4_form(scheme: IntegerScheme, *, is_mixed: bool) -> Int4Form | None:
    """How codes of this scheme are scaled; None if they have not 4 bits."""
    form = Int4Form(scheme.group_size, has_zero=not scheme.is_symmetric, is_mixed=is_mixed)
    return form if scheme.has_codes else None


def groups_in_words(group_size: int | None) -> str:
    """For the log."""
    return "a scale a channel" if group_size is None else f"groups of {group_size}"
