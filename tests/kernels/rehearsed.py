"""Kernels of ours rehearsed and launched for an H200 that is not there: a driver that loads and launches nothing.

Prints what was compiled, loaded and launched when, as JSON. Its parent sets TRITON_CACHE_DIR.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from plait_kernels.ahead import rehearsal
from plait_kernels.attention import triton as attention
from plait_kernels.kv_cache import UNSCALED
from plait_kernels.linear import Tile, few_triton
from plait_kernels.norm import triton as norm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

loaded: list[str] = []
launched: list[bool] = []
found_in_cache: list[bool] = []


class Launcher:
    """One kernel's."""

    def __init__(self, _source: object, metadata: Any) -> None:
        self.is_early = metadata.launch_pdl

    def __call__(self, *_arguments: object) -> None:
        launched.append(self.is_early)


class Driver:
    """Of one H200."""

    launcher_cls = Launcher

    @property
    def utils(self) -> Driver:
        return self

    def load_binary(self, name: str, *_others: object) -> tuple[int, int, int, int, int]:
        loaded.append(name)
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


driver.set_active(Driver())
for module in (attention, few_triton, norm):  # these tensors do not say that they lie on such a GPU
    vars(module)["overlap"] = lambda _tensor: {"OVERLAP": True, "launch_pdl": True}
vars(attention)["_num_sms"] = lambda _device: 132
triton.knobs.compilation.listener = lambda **told: found_in_cache.append(told["cache_hit"])


@triton.jit
def somebody_elses(out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, 1.0)


def empty(*size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=torch.bfloat16)


def steps() -> None:
    """Of 1, 8 and 16 rows: other shares of a row, and numbers that 16 divides, that it does not, and one."""
    for num in (1, 8, 16):
        norm.add_rms_norm(empty(num, 64), empty(num, 64), empty(64), 1e-6)
        few_triton.multiply_few(empty(num, 256), empty(128, 256), Tile(64, 64, 2, 3, 4))
        decode(num, 32)


def decode(num: int, head_dim: int) -> None:
    table, lengths = torch.zeros(num, 4, dtype=torch.int32), torch.zeros(num, dtype=torch.int32)
    q, pages = empty(num, 4, head_dim), empty(8, 2, 2, 16, head_dim)
    attention.decode_paged(q, pages, table, lengths, 0.1, empty(num, 4, head_dim), UNSCALED)


def counts() -> dict[str, int]:
    return {"compiled": len(found_in_cache), "loaded": len(loaded), "launched": len(launched)}


told: dict[str, Any] = {}
with rehearsal(2) as ready:
    steps()
    told["inside"] = counts()["launched"]
    somebody_elses[(1,)](torch.empty(1), launch_pdl=False)
    told["other"] = launched.copy()
    launched.clear()
    decode(1, 24)
told |= {"ready": sorted(ready), "rehearsed": counts(), "found": sum(found_in_cache)}
steps()
told["launched"] = counts()
try:
    decode(1, 24)
except triton.CompilationError as error:
    told["refused"] = str(error).splitlines()[-1]
print(json.dumps(told))
