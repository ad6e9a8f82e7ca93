"""The kernels that there are: where each backend lies, what attends by it, and on which GPUs.

A backend's class is made from a ``Need``'s parts. What its kernels do not take its ``refuse`` raises ``ValueError``
for, with their rule, before any of them is looked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from plait_worker.attention import AttentionBackend, AttentionShape, LatentShape

Capability = tuple[int, int]
"""NVIDIA's version of what a GPU's cores can do."""
HOPPER = frozenset({(9, 0)})
"""H100, H200."""
BLACKWELL = frozenset({(10, 0), (10, 3)})
"""B200, B300 and the GB of each."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a backend is made for."""

    shape: AttentionShape | LatentShape
    page_size: int
    """In tokens."""
    context_chunk: int
    """Cached tokens that latent attention expands at a time."""
    max_tokens: int
    """Of one step."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Kernels:
    """One backend."""

    name: str
    """As ``--attention-backend`` spells it."""
    module: str
    """In ``plait_worker.attention``; imported when it is made, for its library may not be there."""
    class_name: str
    attends: type[AttentionShape] | type[LatentShape]
    """The kind of attention."""
    capabilities: frozenset[Capability]
    needs_modules: bool = True
    """Whether it does not start without flashinfer's modules; else it has kernels of ours in their place."""

    def kind(self) -> Any:
        """The backend's class; raises ``ImportError``."""
        return getattr(importlib.import_module(f"plait_worker.attention.{self.module}"), self.class_name)

    def refuse(self, need: Need) -> None:
        """Raise ``ValueError`` with the rule of its kernels that the need breaks; raises ``ImportError`` too."""
        self.kind().refuse(need.shape, need.page_size)

    def make(self, need: Need, max_tokens: int) -> AttentionBackend[Any]:
        """The backend for steps of up to ``max_tokens``; raises ``ImportError``, and ``ValueError`` with its rule."""
        kind = self.kind()
        if self.attends is AttentionShape:
            backend: AttentionBackend[Any] = kind(need.shape, need.page_size, max_tokens, need.device)
            return backend
        backend = kind(need.shape, need.page_size, need.context_chunk, max_tokens, need.device)
        return backend


KERNELS = (
    Kernels("triton", "triton", "TritonDecode", AttentionShape, HOPPER, needs_modules=False),
    Kernels("trtllm_mha", "trtllm_mha", "TrtllmMha", AttentionShape, HOPPER),
    Kernels("trtllm_mha", "trtllm_gen_mha", "TrtllmGenMha", AttentionShape, BLACKWELL),
    Kernels("flashinfer", "flashinfer", "Flashinfer", AttentionShape, HOPPER),
    Kernels("flashmla", "flashmla", "FlashMla", LatentShape, HOPPER),
    Kernels("flashinfer_mla", "flashinfer_mla", "FlashinferMla", LatentShape, HOPPER),
    Kernels("trtllm_mla", "trtllm_mla", "TrtllmMla", LatentShape, BLACKWELL),
    Kernels("cutlass_mla", "cutlass_mla", "CutlassMla", LatentShape, BLACKWELL),
)


def names(attends: type[AttentionShape] | type[LatentShape], capability: Capability) -> list[str]:
    """The backends that attend this way on such a GPU."""
    return [found.name for found in KERNELS if found.attends is attends and capability in found.capabilities]


def find(name: str, shape: AttentionShape | LatentShape, capability: Capability | None) -> Kernels | str:
    """The backend of this name, or why there is none; ``capability`` is None for a CPU."""
    named = [found for found in KERNELS if found.name == name and found.attends is type(shape)]
    if not named:
        kind = "latent attention (DeepSeek's)" if isinstance(shape, LatentShape) else "attention to keys and values"
        return f"it does not do this model's {kind}"
    here = [found for found in named if capability in found.capabilities]
    if here:
        return here[0]
    known = sorted({capability for found in named for capability in found.capabilities})
    return f"it needs a GPU of compute capability {' or '.join(f'{major}.{minor}' for major, minor in known)}"
