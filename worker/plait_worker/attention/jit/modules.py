"""The modules that flashinfer compiles for attention: which of them a model needs, and which are there.

Beside a prebuilt module flashinfer's own cache is looked at. A module that is in neither, or that the cache has for
another toolkit, has to be compiled, which takes nvcc and minutes. The makers' arguments are those of flashinfer 0.7.2's
own calls, so that the names agree.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from plait_kernels.kv_cache import FP8, PageScales

from plait_worker.attention.jit.compilers import is_up_to_date
from plait_worker.attention.registry import BACKENDS, BackendSpec, Capability
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.model_config import ModelConfig
from plait_worker.parallel import shard_heads

State = Literal["prebuilt", "built", "outdated", "missing"]
_INDEX = torch.int32


class _Spec(Protocol):
    """What flashinfer tells of a module; the library carries no types."""

    @property
    def name(self) -> str: ...

    @property
    def is_aot(self) -> bool: ...

    @property
    def is_compiled(self) -> bool: ...

    def build(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GpuModule:
    """One module and the backends that need it."""

    spec: _Spec
    backends: tuple[str, ...]

    @property
    def name(self) -> str:
        """Flashinfer's."""
        return self.spec.name

    @property
    def state(self) -> State:
        """Whether it came with flashinfer, lies in its cache (``outdated``: for another toolkit), or is nowhere."""
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
        """How many of its files are compiled, and of how many; of 0 before ninja has its rules."""
        try:
            rules = (self.folder / "build.ninja").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0, 0
        num_rules = sum(rule.startswith("build ") for rule in rules)
        return sum(1 for _ in self.folder.glob("*.o")), num_rules - 1  # the last one links

    def build(self) -> None:
        """Compile it into flashinfer's cache; raises ``RuntimeError`` with the compiler's words."""
        self.spec.build()


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""As flashinfer's names have them."""


@dataclass(frozen=True, slots=True)
class _FmhaV2Spec:
    """FMHAv2's: before flashinfer says whether it is there, it writes its 134 sources, which takes 1.5 s."""

    without_sources: _Spec
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


def model_shape(
    config: ModelConfig, world: int, dtype: torch.dtype, fp8: PageScales | None = None
) -> MhaShape | MlaShape:
    """What one of ``world`` ranks attends with; ``fp8`` as in ``MhaShape``: set for a cache in float8."""
    heads, kv_heads = shard_heads(config.num_heads, config.num_kv_heads, 0, world)
    num_heads, num_kv_heads, mla = len(heads), len(kv_heads), config.mla
    if mla is not None:
        dims = (mla.latent_dim, mla.cached_dim, mla.query_dim, mla.value_dim)
        return MlaShape(num_heads, *dims, mla.scale, dtype, cached_dtype=dtype if fp8 is None else FP8)
    return MhaShape(num_heads, num_kv_heads, config.head_dim, config.head_dim**-0.5, dtype, fp8)


def modules_for(shape: MhaShape | MlaShape, page_size: int, capability: Capability) -> list[GpuModule]:
    """Every module that a backend for this kind of attention and GPU would load; ``ImportError`` without flashinfer.

    Torch and FlashMLA's wheel add none. Nor do Blackwell's backends: what flashinfer compiles for them, at their first
    use, includes a header that it has to fetch before it knows the module's name.
    """
    by_name: dict[str, GpuModule] = {}
    for found in BACKENDS:
        if found.attends is type(shape) and capability in found.capabilities:
            for module in backend_modules(found, shape, page_size):
                known = by_name.get(module.name, GpuModule(module.spec, ()))
                by_name[module.name] = GpuModule(known.spec, known.backends + module.backends)
    return list(by_name.values())


def backend_modules(found: BackendSpec, shape: MhaShape | MlaShape, page_size: int) -> list[GpuModule]:
    """Those of one backend; none where flashinfer has no such module for the shape, which the backend then says."""
    try:
        return [GpuModule(make(shape, page_size), (found.name,)) for make in _MAKERS.get(found.module, ())]
    except (ValueError, AssertionError, KeyError):
        return []


def has_fmha_v2(shape: MhaShape) -> bool:
    """Whether FMHAv2 is there; to compile it takes six minutes."""
    return has_flashinfer() and GpuModule(_fmha_v2(shape, 0), ()).is_ready


def prebuilt_folder() -> Path:
    """Where flashinfer looks for modules that it loads as they are."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def has_flashinfer() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("flashinfer") is not None


def _fmha_v2(shape: MhaShape, _page_size: int) -> _Spec:
    from flashinfer.jit.core import JitSpecNvcc

    name = f"trtllm_fmha_v2_q_paged_kv_hnd_{_SHORT[shape.dtype]}_{_SHORT[shape.dtype]}"
    return _FmhaV2Spec(JitSpecNvcc(name, [], None, None, None, None), shape.dtype)


def _xqa(shape: MhaShape, page_size: int) -> Any:
    from flashinfer.jit.xqa import gen_xqa_module

    group = shape.num_heads // shape.num_kv_heads
    return gen_xqa_module(shape.dtype, shape.cached_dtype, page_size, shape.head_dim, group, False, shape.dtype, 1)


def _paged_fa3(shape: MhaShape, _page_size: int) -> Any:
    return _prefill_fa3(shape.dtype, shape.head_dim, shape.head_dim)


def _ragged_fa3(shape: MlaShape, _page_size: int) -> Any:
    return _prefill_fa3(shape.dtype, shape.query_dim, shape.value_dim)


def _prefill_fa3(dtype: torch.dtype, query_dim: int, value_dim: int) -> Any:
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    return gen_batch_prefill_module("fa3", dtype, dtype, dtype, _INDEX, query_dim, value_dim, 0, False, False, False)


def _decode_fa2(shape: MhaShape, _page_size: int) -> Any:
    from flashinfer.jit.attention.modules import _gen_batch_prefill_module

    head, dtype = shape.head_dim, shape.dtype
    return _gen_batch_prefill_module(
        *("fa2", dtype, dtype, dtype, _INDEX, head, head, 0, False, False, False),
        paged_kv_stride_mode="equal",
        module_surface="full",
    )


def _mla_fa3(shape: MlaShape, _page_size: int) -> Any:
    from flashinfer.jit.attention.modules import gen_batch_mla_module

    dtype, rope_dim = shape.dtype, shape.cached_dim - shape.latent_dim
    return gen_batch_mla_module("fa3", dtype, shape.cached_dtype, dtype, _INDEX, shape.latent_dim, rope_dim, False)


_MAKERS: dict[str, tuple[Callable[[Any, int], Any], ...]] = {
    "mha.triton_mha": (_fmha_v2,),
    "mha.trtllm_mha": (_fmha_v2, _xqa),
    "mha.flashinfer_mha": (_paged_fa3, _decode_fa2),
    "mla.flashmla": (_ragged_fa3,),
    "mla.flashinfer_mla": (_ragged_fa3, _mla_fa3),
}
"""By module of ``plait_worker.attention``."""
