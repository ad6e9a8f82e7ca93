"""The modules that flashinfer compiles for attention, and whether each is there.

A module is prebuilt, or in flashinfer's cache, or has to be compiled, which takes nvcc and minutes; one that was built
with another toolkit has to be compiled again. The arguments are those of flashinfer 0.7.2's own calls, so names agree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from plait_worker.attention.jit.compilers import is_up_to_date
from plait_worker.attention.spec import MhaShape, MlaShape

State = Literal["prebuilt", "built", "outdated", "missing"]
_INDEX = torch.int32


class JitSpec(Protocol):
    """Flashinfer's description of a module; the library carries no types."""

    @property
    def name(self) -> str:
        """Its folder's, too."""
        ...

    @property
    def is_aot(self) -> bool:
        """Whether it came with flashinfer."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether its library is there."""
        ...

    def build(self) -> None:
        """Raises ``RuntimeError`` with the compiler's message."""
        ...


@dataclass(frozen=True, slots=True)
class GpuModule:
    """One module and the backends that need it."""

    spec: JitSpec
    backends: tuple[str, ...]

    @property
    def name(self) -> str:
        """As flashinfer calls it."""
        return self.spec.name

    @property
    def state(self) -> State:
        """``outdated`` is built with another toolkit."""
        if self.spec.is_aot:
            return "prebuilt"
        if not self.spec.is_compiled:
            return "missing"
        return "built" if is_up_to_date(self.folder) else "outdated"

    @property
    def is_ready(self) -> bool:
        """Whether it can be loaded without compiling."""
        return self.state in ("prebuilt", "built")

    @property
    def folder(self) -> Path:
        """Where flashinfer compiles it."""
        from flashinfer.jit import env

        return Path(env.FLASHINFER_JIT_DIR) / self.name

    def num_files(self) -> tuple[int, int]:
        """Compiled files and all files; both 0 before ninja has its rules."""
        try:
            rules = (self.folder / "build.ninja").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0, 0
        num_rules = sum(rule.startswith("build ") for rule in rules)
        return sum(1 for _ in self.folder.glob("*.o")), num_rules - 1  # the last one links

    def build(self) -> None:
        """Compile it into flashinfer's cache; raises ``RuntimeError`` with the compiler's message."""
        self.spec.build()


Maker = Callable[[Any, int], JitSpec]
"""From an attention spec and a page size in tokens to the module that a backend loads for them."""
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""As in flashinfer's names."""


@dataclass(frozen=True, slots=True)
class _FmhaV2Spec:
    """FMHAv2's. flashinfer's own spec writes 134 source files first, which takes 1.5 s."""

    without_sources: JitSpec
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.without_sources.name

    @property
    def is_aot(self) -> bool:
        return self.without_sources.is_aot

    @property
    def is_compiled(self) -> bool:
        return self.without_sources.is_compiled

    def build(self) -> None:
        from flashinfer.jit.attention.modules import gen_fmha_v2_module

        gen_fmha_v2_module("q_paged_kv_hnd", self.dtype, self.dtype).build()


def has_fmha_v2(shape: MhaShape) -> bool:
    """Whether FMHAv2 is built; compiling it takes six minutes."""
    return has_flashinfer() and GpuModule(fmha_v2(shape, 0), ()).is_ready


def prebuilt_folder() -> Path:
    """Where flashinfer looks for prebuilt modules."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def has_flashinfer() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("flashinfer") is not None


def fmha_v2(shape: MhaShape, _page_size: int) -> JitSpec:
    """FMHAv2 over pages."""
    from flashinfer.jit.core import JitSpecNvcc

    name = f"trtllm_fmha_v2_q_paged_kv_hnd_{_SHORT[shape.dtype]}_{_SHORT[shape.dtype]}"
    return _FmhaV2Spec(JitSpecNvcc(name, [], None, None, None, None), shape.dtype)


def xqa(shape: MhaShape, page_size: int) -> Any:
    """XQA, for decode rows."""
    from flashinfer.jit.xqa import gen_xqa_module

    group = shape.num_heads // shape.num_kv_heads
    return gen_xqa_module(shape.dtype, shape.cached_dtype, page_size, shape.head_dim, group, False, shape.dtype, 1)


def paged_fa3(shape: MhaShape, _page_size: int) -> Any:
    """fa3 over pages, for prefill rows."""
    return _prefill_fa3(shape.dtype, shape.head_dim, shape.head_dim)


def ragged_fa3(shape: MlaShape, _page_size: int) -> Any:
    """fa3 over keys and values of every head, not paged."""
    return _prefill_fa3(shape.dtype, shape.query_dim, shape.value_dim)


def _prefill_fa3(dtype: torch.dtype, query_dim: int, value_dim: int) -> Any:
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    return gen_batch_prefill_module("fa3", dtype, dtype, dtype, _INDEX, query_dim, value_dim, 0, False, False, False)


def decode_fa2(shape: MhaShape, _page_size: int) -> Any:
    """fa2 over pages, for decode rows."""
    from flashinfer.jit.attention.modules import _gen_batch_prefill_module

    head, dtype = shape.head_dim, shape.dtype
    return _gen_batch_prefill_module(
        *("fa2", dtype, dtype, dtype, _INDEX, head, head, 0, False, False, False),
        paged_kv_stride_mode="equal",
        module_surface="full",
    )


def mla_fa3(shape: MlaShape, _page_size: int) -> Any:
    """fa3 over MLA pages."""
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    dtype, rope_dim = shape.dtype, shape.cached_dim - shape.latent_dim
    return gen_batch_mla_module("fa3", dtype, shape.cached_dtype, dtype, _INDEX, shape.latent_dim, rope_dim, False)
