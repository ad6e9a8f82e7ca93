"""Requests at a time, tokens a step and rows of CUDA graphs, where the user gives none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from plait.errors import SettingsError, StartError
from plait.gpu_sizes import MEMORY_FRACTION, BatchSizes, ModelSize, gpu_sizes, kv_copies
from plait.nvidia import gpu_memory_bytes, has_nvidia_gpu, is_hopper
from plait.plan.layout import Layout
from plait.plan.model import PlannedModel, read_model
from plait.plan.stored_form import on_gpu
from plait.settings import SchedulerSettings, ServeSettings

CPU_SEQS = 64
"""Over 64 rows a CPU hardly gains throughput, while each request's ITL grows."""
CPU_BATCH_TOKENS = 160
"""On two cores such a step takes 0.1 s with a 135M model. Larger steps do not raise the throughput."""
CPU_SIZES = BatchSizes(CPU_SEQS, CPU_BATCH_TOKENS, "a CPU hardly gains from more")


def with_batch_sizes(
    settings: ServeSettings,
    model: Path,
    gpu_memory: Callable[[], int | None] = gpu_memory_bytes,
    keeps_quantised: Callable[[], bool] = is_hopper,
) -> tuple[ServeSettings, str]:
    """The settings with all batch sizes filled in, and the reason for those that the user left open.

    `keeps_quantised`: whether the GPUs have kernels for quantised weights.
    """
    given = settings.scheduler
    if given.max_seqs is not None and given.max_batch_tokens is not None:
        return settings, "as given"
    sizes = CPU_SIZES
    if uses_gpu(settings):
        fraction = settings.pages.memory_fraction or MEMORY_FRACTION
        size, copies = _size_of(model, settings, keeps_quantised)
        sizes = gpu_sizes(size, gpu_memory(), settings.process.tp, fraction, copies)
    filled = msgspec.structs.replace(
        given,
        max_seqs=given.max_seqs or sizes.max_seqs,
        max_batch_tokens=given.max_batch_tokens or sizes.max_batch_tokens,
    )
    return msgspec.structs.replace(settings, scheduler=filled), sizes.reason


def check_chunk(scheduler: SchedulerSettings) -> None:
    """Raise `SettingsError` for a chunk that no step holds."""
    chunk, budget = scheduler.long_prefill_token_threshold, scheduler.max_batch_tokens
    if chunk is not None and budget is not None and chunk > budget:
        raise SettingsError(
            f"--long-prefill-token-threshold is {chunk}; 1 to {budget} are allowed, the tokens of a step: lower it, "
            "or raise --max-batch-tokens"
        )


def uses_gpu(settings: ServeSettings) -> bool:
    """Whether the workers will compute on a GPU."""
    device = settings.device.device
    return device == "cuda" or (device == "auto" and has_nvidia_gpu())


def _size_of(
    model: Path, settings: ServeSettings, keeps_quantised: Callable[[], bool]
) -> tuple[ModelSize | None, float]:
    """And the copies of its KV. None for a GGUF file and for a configuration that is none."""
    process = settings.process
    try:
        with tempfile.TemporaryDirectory(prefix="plait-") as scratch:
            held = _held(read_model(str(model / "config.json"), Path(scratch)), settings, keeps_quantised)
    except StartError:
        return None, 1.0
    weight_bytes = Layout(process.tp, process.dp, process.dp_attention).weight_bytes(held) * process.tp
    return msgspec.structs.replace(held.size, weight_bytes=weight_bytes), kv_copies(held.config, process.tp)


def _held(model: PlannedModel, settings: ServeSettings, keeps_quantised: Callable[[], bool]) -> PlannedModel:
    """As the GPUs hold it: `--dtype` widens quantised weights too."""
    quantization, is_widened = settings.model.quantization, settings.model.dtype != "auto"
    is_dense = model.storage.form is None and quantization == "auto"
    keeps = is_dense or (not is_widened and keeps_quantised())
    return replace(model, storage=on_gpu(model.storage, "GPU", keeps, quantization))
