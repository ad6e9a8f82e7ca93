"""The registry: for each kind of attention its torch reference, its CPU kernels and its GPU backends.

A backend's ``validate`` raises ``ValueError`` with the broken rule before any kernel is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.compressed.self_check import CompressedSelfCheck
from plait_worker.attention.compressed.torch_compressed import TorchCompressed
from plait_worker.attention.jit import modules
from plait_worker.attention.jit.modules import GpuModule
from plait_worker.attention.mha.cpu_mha import CpuMha
from plait_worker.attention.mha.self_check import MhaSelfCheck
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.mla.cpu_mla import CpuMla
from plait_worker.attention.mla.self_check import MlaSelfCheck
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.self_check import SelfCheck
from plait_worker.attention.spec import AttentionSpec, CompressedShape, MhaShape, MlaShape, distinct

Capability = tuple[int, int]
"""NVIDIA's compute capability."""
HOPPER = frozenset({(9, 0)})
"""H100, H200."""
BLACKWELL = frozenset({(10, 0), (10, 3)})
"""B200, B300 and the GB of each."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One GPU backend."""

    name: str
    """As ``--attention-backend`` spells it."""
    module: str
    """In ``plait_worker.attention``; imported when it is made, since its library may not be installed."""
    class_name: str
    capabilities: frozenset[Capability]
    makers: tuple[modules.Maker, ...] = ()
    """Of the flashinfer modules that it loads."""
    needs_modules: bool = True
    """Whether it does not start without these modules; else kernels of ours take their place."""

    def load(self) -> Any:
        """The backend's class; raises ``ImportError``."""
        return getattr(importlib.import_module(f"plait_worker.attention.{self.module}"), self.class_name)

    def validate(self, requirements: BackendRequirements[Any]) -> None:
        """Raises ``ValueError`` with the rule that is broken, and ``ImportError``."""
        self.load().validate(requirements)

    def make(self, requirements: BackendRequirements[Any]) -> AttentionBackend[Any]:
        """Raises ``ValueError`` with the rule that is broken, and ``ImportError``."""
        backend: AttentionBackend[Any] = self.load()(requirements)
        return backend

    def modules(self, spec: AttentionSpec, page_size: int) -> list[GpuModule]:
        """Its flashinfer modules; none if flashinfer cannot make them for the spec, which ``validate`` reports."""
        try:
            return [GpuModule(make(spec, page_size), (self.name,)) for make in self.makers]
        except (ValueError, AssertionError, KeyError):
            return []


class CpuBackend(Protocol):
    """The class of a backend of compiled CPU kernels."""

    def __call__(self, requirements: BackendRequirements[Any], /) -> AttentionBackend[Any]:
        """For a spec that it takes."""
        ...

    def supports(self, spec: Any, /) -> bool:
        """Whether the kernels are there and attend in this shape."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What is registered for one kind of attention."""

    torch: Callable[[BackendRequirements[Any]], AttentionBackend[Any]]
    """The reference, on any device."""
    cpu: CpuBackend | None
    """None if torch computes on a CPU too."""
    self_check: Callable[[BackendRequirements[Any]], SelfCheck] | None
    """None without GPU backends."""
    gpu: tuple[BackendSpec, ...]
    """Several may share a name: one for each generation of GPUs.

    Of those about as fast by themselves ``auto`` takes the first; MLA's are in the order of their decode steps.
    """


KINDS = {
    MhaShape.kind: AttentionKind(
        torch=TorchMha,
        cpu=CpuMha,
        self_check=MhaSelfCheck,
        gpu=(
            BackendSpec("triton", "mha.triton_mha", "TritonMha", HOPPER, (modules.fmha_v2,), needs_modules=False),
            BackendSpec("trtllm_mha", "mha.trtllm_mha", "TrtllmMha", HOPPER, (modules.fmha_v2, modules.xqa)),
            BackendSpec("trtllm_mha", "mha.trtllm_gen_mha", "TrtllmGenMha", BLACKWELL),
            BackendSpec(
                *("flashinfer", "mha.flashinfer_mha", "FlashinferMha", HOPPER),
                (modules.paged_fa3, modules.decode_fa2),
            ),
        ),
    ),
    MlaShape.kind: AttentionKind(
        torch=TorchMla,
        cpu=CpuMla,
        self_check=MlaSelfCheck,
        gpu=(
            BackendSpec("triton_mla", "mla.triton_mla", "TritonMla", HOPPER, (modules.ragged_fa3,)),
            BackendSpec("flashmla", "mla.flashmla", "FlashMla", HOPPER, (modules.ragged_fa3,)),
            BackendSpec(
                *("flashinfer_mla", "mla.flashinfer_mla", "FlashinferMla", HOPPER),
                (modules.ragged_fa3, modules.mla_fa3),
            ),
            BackendSpec("trtllm_mla", "mla.trtllm_mla", "TrtllmMla", BLACKWELL),
            BackendSpec("cutlass_mla", "mla.cutlass_mla", "CutlassMla", BLACKWELL),
        ),
    ),
    CompressedShape.kind: AttentionKind(
        torch=TorchCompressed,
        cpu=None,
        self_check=CompressedSelfCheck,
        gpu=(BackendSpec("trtllm_sparse_mla", "compressed.trtllm_compressed", "TrtllmCompressed", BLACKWELL),),
    ),
}
"""By ``AttentionSpec.kind``."""


def all_names() -> list[str]:
    """Of the GPU backends of every kind, sorted."""
    return sorted({backend.name for kind in KINDS.values() for backend in kind.gpu})


def names(kind: str, capability: Capability) -> list[str]:
    """The backends of this kind of attention on such a GPU."""
    return [backend.name for backend in KINDS[kind].gpu if capability in backend.capabilities]


def find(name: str, spec: AttentionSpec, capability: Capability | None) -> BackendSpec | str:
    """The backend of this name, or why there is none; ``capability`` is None for a CPU."""
    named = [backend for backend in KINDS[spec.kind].gpu if backend.name == name]
    if not named:
        return f"it does not do this model's {spec.description}"
    here = [backend for backend in named if capability in backend.capabilities]
    if here:
        return here[0]
    known = sorted({capability for backend in named for capability in backend.capabilities})
    return f"it needs a GPU of compute capability {' or '.join(f'{major}.{minor}' for major, minor in known)}"


def modules_for(specs: Iterable[AttentionSpec], page_size: int, capability: Capability) -> list[GpuModule]:
    """Every module that a backend for these specs and GPU loads; raises ``ImportError`` without flashinfer.

    Torch and FlashMLA's wheel add none. Nor do Blackwell's backends: flashinfer compiles theirs at first use, and has
    to fetch a header before it knows a module's name.
    """
    by_name: dict[str, GpuModule] = {}
    for spec in distinct(specs):
        for backend in KINDS[spec.kind].gpu:
            for module in backend.modules(spec, page_size) if capability in backend.capabilities else []:
                known = by_name.get(module.name, GpuModule(module.spec, ()))
                backends = tuple(dict.fromkeys(known.backends + module.backends))
                by_name[module.name] = GpuModule(known.spec, backends)
    return list(by_name.values())
