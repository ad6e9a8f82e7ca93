"""`plait plan`: memory, requests, expected rates and the flags to use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait_proto import ExitCode

from plait.batch_sizes import MEMORY_FRACTION
from plait.errors import DONE, SettingsError, StartError
from plait.plan.gpus import GPUS, Gpu
from plait.plan.layout import CONTEXT_BYTES, Layout, Memory, layouts, memory
from plait.plan.model import PlannedModel, read_model
from plait.plan.rates import Expectations, Expected
from plait.plan.settings import PlanSettings

STREAMS = (1, 8, 64, 256, 1024)
"""Loads of the second table."""
Choice = tuple[Layout, Memory, Expected]


def plan(model: str, settings: PlanSettings) -> int:
    """Print the plan; the exit code. Raises `StartError` if the model does not fit."""
    _check(settings)
    with tempfile.TemporaryDirectory(prefix="plait-") as scratch:
        shape, config = read_model(model, Path(scratch))
        gpu = GPUS[settings.machine.gpu]
        expectations = Expectations(shape, gpu, config)
        choices = _choices(shape, gpu, settings, expectations)
        print("\n".join(_lines(model, shape, settings, choices, expectations)))
    return DONE


def _check(settings: PlanSettings) -> None:
    if settings.server.page_size.bit_count() != 1:
        raise SettingsError(f"--page-size is {settings.server.page_size}; allowed: a power of two from 1 to 1024")


def _choices(shape: PlannedModel, gpu: Gpu, settings: PlanSettings, expectations: Expectations) -> list[Choice]:
    """Each layout that holds the load's request, with what it should reach."""
    load, server = settings.load, settings.server
    num_tokens, context = load.input_len + load.output_len, _context(shape, settings)
    if num_tokens > context:
        raise SettingsError(
            f"--input-len and --output-len are {num_tokens} tokens, and the context has {context}; lower them"
        )
    rooms = [(layout, memory(shape, gpu, layout, server)) for layout in layouts(shape, settings.machine.gpus)]
    fitting = [(layout, room) for layout, room in rooms if room.num_requests(num_tokens) >= 1]
    if not fitting:
        raise _too_large(shape, gpu, settings)
    return [(layout, room, expectations.at(layout, room, load)) for layout, room in fitting]


def _context(shape: PlannedModel, settings: PlanSettings) -> int:
    return min(shape.context, settings.server.max_model_len or shape.context)


def _too_large(shape: PlannedModel, gpu: Gpu, settings: PlanSettings) -> StartError:
    usable = (gpu.memory_bytes - CONTEXT_BYTES) * (settings.server.memory_fraction or MEMORY_FRACTION)
    return StartError(
        f"the weights take {_gb(shape.size.weight_bytes)} in 16 bits, and {settings.machine.gpus} {gpu.name} have "
        f"{_gb(usable * settings.machine.gpus)} for weights, steps and KV pages; no layout holds a request of "
        f"{settings.load.input_len + settings.load.output_len:,} tokens: use more --gpus, a larger --gpu or a smaller "
        "model",
        ExitCode.HARDWARE,
    )


def _lines(
    model: str, shape: PlannedModel, settings: PlanSettings, choices: list[Choice], expectations: Expectations
) -> Iterator[str]:
    load, context, gpu = settings.load, _context(shape, settings), GPUS[settings.machine.gpu]
    best = max(choices, key=lambda choice: choice[2].output_tokens_per_second)
    layout, room, _ = best
    first = expectations.first_token_seconds(layout, room, load)
    yield _summary(shape, gpu, settings)
    yield ""
    yield from _layout_table(choices, best, settings, context)
    yield ""
    yield f"Expected of {layout.flags or 'one GPU'}, prompts of {load.input_len:,} and answers of {load.output_len:,}:"
    yield from _load_table(layout, room, settings, expectations)
    yield f"First token on an idle server: {first * 1e3:,.0f} ms, HTTP and tokenising left out. No prefix is cached."
    yield f"Rates of the {gpu.name}: {gpu.source}."
    yield ""
    served = _served(model)
    yield "Use:" if served is not None else f"Use, with the folder that has the weights of {model} for MODEL:"
    yield "  " + _command(served or "MODEL", settings, layout, room, context)
    yield f"It runs {room.sizes.max_seqs} requests at a time in a replica, {room.sizes.max_batch_tokens} tokens a step."


def _summary(shape: PlannedModel, gpu: Gpu, settings: PlanSettings) -> str:
    halves = 2 if settings.server.kv_cache_dtype == "fp8" else 1
    return (
        f"{settings.machine.gpus} {gpu.name} of {_gb(gpu.memory_bytes)}; "
        f"weights {_gb(shape.size.weight_bytes)} in 16 bits; "
        f"KV of a token {shape.size.kv_bytes_per_token / halves / 1e3:,.1f} kB"
    )


def _layout_table(choices: list[Choice], best: Choice, settings: PlanSettings, context: int) -> Iterator[str]:
    """Bytes of each GPU; tokens, requests and rates of all together."""
    load = settings.load
    num_tokens = load.input_len + load.output_len
    heads = ("weights", "a step", "KV", "KV tokens", f"of {num_tokens:,}", f"of {context:,}", f"at {load.streams:,}")
    yield f"{'':<26}{'each GPU':>36}{'':>12}{'most requests':>24}{'tokens/s':>12}"
    yield f"{'':<26}" + "".join(f"{head:>12}" for head in heads)
    for choice in choices:
        layout, room, expected = choice
        cells = (
            _gb(room.weight_bytes),
            _gb(room.step_bytes),
            _gb(room.num_pages * room.page_bytes),
            f"{room.kv_tokens * layout.dp:,}",
            f"{room.num_requests(num_tokens) * layout.dp:,}",
            f"{room.num_requests(context) * layout.dp:,}",
            f"{expected.output_tokens_per_second:,.0f}",
        )
        mark = "* " if choice is best else "  "
        yield f"{mark + (layout.flags or 'one GPU'):<26}" + "".join(f"{cell:>12}" for cell in cells)


def _load_table(layout: Layout, room: Memory, settings: PlanSettings, expectations: Expectations) -> Iterator[str]:
    load = settings.load
    most = room.num_requests(load.input_len + load.output_len) * layout.dp
    yield f"{'streams':>10}{'output tokens/s':>18}{'ITL p50, ms':>14}{'ITL p99, ms':>14}"
    for streams in (streams for streams in STREAMS if streams <= most):
        expected = expectations.at(layout, room, msgspec.structs.replace(load, streams=streams))
        yield (
            f"{streams:>10,}{expected.output_tokens_per_second:>18,.0f}"
            f"{expected.itl_p50 * 1e3:>14.1f}{expected.itl_p99 * 1e3:>14.1f}"
        )


def _served(model: str) -> str | None:
    """What `plait serve` takes for `model`; None if it is a file without weights beside it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return model
    has_weights = path.name == "config.json" and any(path.parent.glob("*.safetensors"))
    return str(path.parent) if has_weights else None


def _command(model: str, settings: PlanSettings, layout: Layout, room: Memory, context: int) -> str:
    """With the longest context that the pool holds, if the model's does not fit."""
    server = settings.server
    words = ["plait serve", model] + [layout.flags] * bool(layout.flags)
    longest = min(context, room.kv_tokens)
    if server.max_model_len is not None or longest < context:
        words.append(f"--max-model-len {longest}")
    if server.kv_cache_dtype != "auto":
        words.append(f"--kv-cache-dtype {server.kv_cache_dtype}")
    given = {
        "--memory-fraction": server.memory_fraction,
        "--max-seqs": server.max_seqs,
        "--max-batch-tokens": server.max_batch_tokens,
    }
    words += [f"{flag} {value:g}" for flag, value in given.items() if value is not None]
    return " ".join(words)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
