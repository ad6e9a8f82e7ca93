"""The registry of GPU backends: module and class of each, its kind of attention, and its GPUs.

A backend's ``validate`` raises ``ValueError`` with the rule that a shape breaks, before any kernel is looked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from plait_worker.attention.backend import AttentionBackend
from plait_worker.attention.spec import MhaShape, MlaShape

Capability = tuple[int, int]
"""NVIDIA's version of what a GPU's cores can do."""
HOPPER = frozenset({(9, 0)})
"""H100, H200."""
BLACKWELL = frozenset({(10, 0), (10, 3)})
"""B200, B300 and the GB of each."""


@dataclass(frozen=True, slots=True)
class BackendRequirements:
    """What a backend is made for."""

    shape: MhaShape | MlaShape
    page_size: int
    """In tokens."""
    mla_context_chunk_size: int
    """Cached tokens that latent attention expands at a time."""
    max_tokens: int
    """Of one step."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One backend."""

    name: str
    """As ``--attention-backend`` spells it."""
    module: str
    """In ``plait_worker.attention``; imported when it is made, for its library may not be there."""
    class_name: str
    attends: type[MhaShape] | type[MlaShape]
    """The kind of attention."""
    capabilities: frozenset[Capability]
    needs_modules: bool = True
    """Whether it does not start without flashinfer's modules; else it has kernels of ours in their place."""

    def kind(self) -> Any:
        """The backend's class; raises ``ImportError``."""
        return getattr(importlib.import_module(f"plait_worker.attention.{self.module}"), self.class_name)

    def validate(self, requirements: BackendRequirements) -> None:
        """Raise ``ValueError`` with the rule of its kernels that the need breaks; raises ``ImportError`` too."""
        self.kind().validate(requirements.shape, requirements.page_size)

    def make(self, requirements: BackendRequirements, max_tokens: int) -> AttentionBackend[Any]:
        """The backend for steps of up to ``max_tokens``; raises ``ImportError``, and ``ValueError`` with its rule."""
        kind = self.kind()
        if self.attends is MhaShape:
            backend: AttentionBackend[Any] = kind(
                requirements.shape, requirements.page_size, max_tokens, requirements.device
            )
            return backend
        backend = kind(
            requirements.shape,
            requirements.page_size,
            requirements.mla_context_chunk_size,
            max_tokens,
            requirements.device,
        )
        return backend


BACKENDS = (
    BackendSpec("triton", "mha.triton_mha", "TritonMha", MhaShape, HOPPER, needs_modules=False),
    BackendSpec("trtllm_mha", "mha.trtllm_mha", "TrtllmMha", MhaShape, HOPPER),
    BackendSpec("trtllm_mha", "mha.trtllm_gen_mha", "TrtllmGenMha", MhaShape, BLACKWELL),
    BackendSpec("flashinfer", "mha.flashinfer_mha", "FlashinferMha", MhaShape, HOPPER),
    BackendSpec("flashmla", "mla.flashmla", "FlashMla", MlaShape, HOPPER),
    BackendSpec("flashinfer_mla", "mla.flashinfer_mla", "FlashinferMla", MlaShape, HOPPER),
    BackendSpec("trtllm_mla", "mla.trtllm_mla", "TrtllmMla", MlaShape, BLACKWELL),
    BackendSpec("cutlass_mla", "mla.cutlass_mla", "CutlassMla", MlaShape, BLACKWELL),
)


def names(attends: type[MhaShape] | type[MlaShape], capability: Capability) -> list[str]:
    """The backends that attend this way on such a GPU."""
    return [found.name for found in BACKENDS if found.attends is attends and capability in found.capabilities]


def find(name: str, shape: MhaShape | MlaShape, capability: Capability | None) -> BackendSpec | str:
    """The backend of this name, or why there is none; ``capability`` is None for a CPU."""
    named = [found for found in BACKENDS if found.name == name and found.attends is type(shape)]
    if not named:
        kind = "latent attention (DeepSeek's)" if isinstance(shape, MlaShape) else "attention to keys and values"
        return f"it does not do this model's {kind}"
    here = [found for found in named if capability in found.capabilities]
    if here:
        return here[0]
    known = sorted({capability for found in named for capability in found.capabilities})
    return f"it needs a GPU of compute capability {' or '.join(f'{major}.{minor}' for major, minor in known)}"
