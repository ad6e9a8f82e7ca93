"""GPUs that a plan may be for: their memory, and the rates that Plait reaches on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GROUPED_GEMM_SHARE = 0.7
"""Of the rate of large GEMMs that the grouped GEMMs of experts reach; fitted as the H200's rates are."""
_UNLIMITED = 1e15
"""Bytes: the plan itself checks the memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    """As `nvidia-smi` reports it."""
    gemm_flops: float
    """FLOP/s of large bfloat16 GEMMs."""
    attention_flops: float
    """FLOP/s of prefill attention."""
    copy_bytes: float
    """Bytes/s that a step reads."""
    link_bytes: float
    """Tensor bytes/s of an all-reduce."""
    source: str
    """Where the rates come from."""

    is_hopper: bool = True
    """Whether our FP8 and 4-bit kernels run on it, and full steps of MLA models are CUDA graphs."""

    def flops(self, has_experts: bool) -> float:
        """FLOP/s of a model's bfloat16 GEMMs."""
        return self.gemm_flops * (GROUPED_GEMM_SHARE if has_experts else 1)

    def rates(self, gemm_flops: float, link_bytes: float) -> dict[str, object]:
        """As `plait simulate --hardware FILE` reads them."""
        return {
            "name": self.name,
            "source": self.source,
            "flops_per_second": {"bfloat16": gemm_flops, "float8": gemm_flops},
            "attention_flops_per_second": self.attention_flops,
            "bytes_per_second": self.copy_bytes,
            "memory_bytes": _UNLIMITED,
            "step_overhead_seconds": STEP_OVERHEAD_SECONDS,
            "link_latency_seconds": LINK_LATENCY_SECONDS,
            "link_bytes_per_second": link_bytes,
        }


@dataclass(frozen=True, slots=True)
class GemmShares:
    """Of bfloat16's rates that GEMMs with quantised weights reach."""

    reading: float = 1.0
    """Of bytes/s."""
    flops: float = 1.0
    """Of FLOP/s."""
    few_rows_flops: float | None = None
    """Of FLOP/s up to `FEW_ROWS`; None: as with more."""


@dataclass(frozen=True, slots=True)
class FormShares:
    """Of one form of weights."""

    dense: GemmShares = GemmShares()
    experts: GemmShares = GemmShares()


FEW_ROWS = 512
"""Up to some hundred rows 4-bit codes are de-quantised inside the GEMM."""
_EXPERTS_OF_4_BITS = GemmShares(0.55, 0.85)
# Dense FP8 and INT4, and experts of FP8, are fitted to 12 loads of Qwen3-8B and V2-Lite on one H200. MXFP4, and experts
# of 4 bits, are as their GEMMs alone (tests/bench/results/gpu-int4-gemms.json).
FORM_SHARES: Mapping[str, FormShares] = MappingProxyType(
    {
        "FP8": FormShares(GemmShares(1.2, 1.6), GemmShares(0.75, 1.45)),
        "INT4": FormShares(GemmShares(0.85, 0.9, 0.8), _EXPERTS_OF_4_BITS),
        "MXFP4": FormShares(GemmShares(0.7, 0.87, 0.6), _EXPERTS_OF_4_BITS),
    }
)

STEP_OVERHEAD_SECONDS = 0.001
"""Of a step, beside reading and computing: launches, norms, sampling."""
LINK_LATENCY_SECONDS = 4e-6
"""Of one all-reduce over peers' memory."""

# The H200's rates are fitted to 20 loads of two models on one and two of them (tests/router/test_plan.py).
_H200 = Gpu("H200", 143_771 << 20, 640e12, 400e12, 3.9e12, 1.5e11, "fitted to measured servers")


def _scaled(name: str, memory_mib: int, flops: float, bandwidth: float, link: float, *, is_hopper: bool = True) -> Gpu:
    """The H200's rates times these ratios of the GPUs' data sheets."""
    return Gpu(
        name,
        memory_mib << 20,
        _H200.gemm_flops * flops,
        _H200.attention_flops * flops,
        _H200.copy_bytes * bandwidth,
        _H200.link_bytes * link,
        "the H200's, scaled by the data sheets; never measured",
        is_hopper,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h100": _scaled("H100", 81_559, 1.0, 3.35 / 4.8, 1.0),
        "h200": _H200,
        "b200": _scaled("B200", 183_359, 2.25 / 0.99, 8.0 / 4.8, 2.0, is_hopper=False),
    }
)
