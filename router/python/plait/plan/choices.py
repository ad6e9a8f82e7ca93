"""The layouts that hold a load's requests, and why none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait_proto import ExitCode

from plait.errors import SettingsError, StartError
from plait.gpu_sizes import MEMORY_FRACTION
from plait.plan.gpus import Gpu
from plait.plan.layout import CONTEXT_BYTES, Layout, Memory, layouts, memory
from plait.plan.model import PlannedModel
from plait.plan.settings import MAX_GPUS, PlanSettings
from plait.plan.words import amount, held_as

LaidOut = tuple[Layout, Memory]


@dataclass(frozen=True, slots=True)
class Fitting:
    """Layouts of so many GPUs, with the memory that each leaves."""

    num_gpus: int
    laid_out: list[LaidOut]


def longest_context(model: PlannedModel, settings: PlanSettings) -> int:
    """In tokens."""
    return min(model.context, settings.server.max_model_len or model.context)


def fitting(model: PlannedModel, gpu: Gpu, settings: PlanSettings) -> Fitting:
    """Of all GPUs, or of the most that have a layout. Raises `StartError` if there is none."""
    _check_load(model, settings)
    given = settings.machine.gpus
    found = next(_fitting(model, gpu, settings, range(given, 0, -1)), None)
    if found is None:
        raise _too_large(model, gpu, settings)
    return found


def _check_load(model: PlannedModel, settings: PlanSettings) -> None:
    num_tokens, context = settings.load.num_tokens, longest_context(model, settings)
    if num_tokens > context:
        raise SettingsError(
            f"--input-len and --output-len are {num_tokens} tokens, and the context has {context}; lower them"
        )


def _fitting(model: PlannedModel, gpu: Gpu, settings: PlanSettings, numbers: range) -> Iterator[Fitting]:
    for num_gpus in numbers:
        planned = layouts(model, num_gpus, settings.machine.gpus_per_node)
        laid_out = [(layout, memory(model, gpu, layout, settings.server)) for layout in planned]
        if holding := [each for each in laid_out if each[1].num_requests(settings.load.num_tokens) >= 1]:
            yield Fitting(num_gpus, holding)


def _too_large(model: PlannedModel, gpu: Gpu, settings: PlanSettings) -> StartError:
    given, num_tokens = settings.machine.gpus, settings.load.num_tokens
    usable = (gpu.memory_bytes - CONTEXT_BYTES) * (settings.server.memory_fraction or MEMORY_FRACTION)
    weights = f"{amount(Layout(1, 1).weight_bytes(model))} {held_as(model.storage)}"
    verb = "has" if given == 1 else "have"
    return StartError(
        f"the weights take {weights}, and {given} {gpu.name} {verb} {amount(usable * given)} for weights, steps and KV "
        f"pages; no layout holds a request of {num_tokens:,} tokens: {_advice(model, gpu, settings)}",
        ExitCode.HARDWARE,
    )


def _advice(model: PlannedModel, gpu: Gpu, settings: PlanSettings) -> str:
    """The fewest GPUs that do, if there are such."""
    numbers = range(settings.machine.gpus + 1, MAX_GPUS + 1)
    if (more := next(_fitting(model, gpu, settings, numbers), None)) is None:
        return f"none of up to {MAX_GPUS} GPUs does: use a larger --gpu, a smaller model or quantised weights"
    layout = more.laid_out[0][0]
    return f"use --gpus {more.num_gpus} ({layout.flags}), a larger --gpu or a smaller model"
