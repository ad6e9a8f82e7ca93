"""Settings of `plait plan`; those of the server are as for `plait serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.setting import Setting
from plait.settings import PAGE_SIZE, ContextLength, Fraction, PageSize, SlotCount, TokenLimit

GpuName = Literal["h100", "h200", "b200"]
MAX_GPUS = 64
GpuCount = Annotated[int, Meta(ge=1, le=MAX_GPUS)]
Length = Annotated[int, Meta(ge=1, le=16_777_216)]
StreamCount = Annotated[int, Meta(ge=1, le=65_536)]


class MachineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs."""

    gpus: Annotated[GpuCount, Setting("GPUs of all nodes")] = 1
    gpu: Annotated[GpuName, Setting("kind of GPU")] = "h200"
    gpus_per_node: Annotated[GpuCount, Setting("GPUs of a node; more take several, by `plait launch`")] = 8


class PlanLoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Load."""

    input_len: Annotated[Length, Setting("prompt tokens of each request")] = 1024
    output_len: Annotated[Length, Setting("output tokens of each request")] = 128
    streams: Annotated[StreamCount, Setting("requests under way at a time, by which layouts are compared")] = 256

    @property
    def num_tokens(self) -> int:
        """Of a request."""
        return self.input_len + self.output_len


class PlanServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Server."""

    max_model_len: Annotated[
        ContextLength | None,
        Setting("longest prompt plus output, in tokens", ("--context-length",), unset="the model's context"),
    ] = None
    quantization: Annotated[
        Literal["auto", "fp8"], Setting("auto takes the weights as the files have them; fp8 makes 16-bit ones FP8")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], Setting("type of the KV cache; rates are those of auto", ("--kv-dtype",))
    ] = "auto"
    memory_fraction: Annotated[
        Fraction | None,
        Setting(
            "share of the free memory for weights and KV pages",
            ("--gpu-memory-utilization", "--mem-fraction-static"),
            unset="0.9",
        ),
    ] = None
    page_size: Annotated[PageSize, Setting("tokens in a page, a power of two", ("--block-size",))] = PAGE_SIZE
    max_seqs: Annotated[
        SlotCount | None,
        Setting(
            "most requests that run at a time in a replica",
            ("--max-num-seqs", "--max-running-requests"),
            unset="as serve chooses it",
        ),
    ] = None
    max_batch_tokens: Annotated[
        TokenLimit | None,
        Setting(
            "most tokens of one step",
            ("--max-num-batched-tokens", "--chunked-prefill-size"),
            unset="as serve chooses it",
        ),
    ] = None


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait plan`."""

    machine: MachineSettings = MachineSettings()
    load: PlanLoadSettings = PlanLoadSettings()
    server: PlanServerSettings = PlanServerSettings()
