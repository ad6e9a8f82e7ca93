"""The command that starts what was planned."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from plait.plan.layout import Layout, Memory
from plait.plan.settings import PlanServerSettings, PlanSettings

_NODE_FLAGS = "--node-rank RANK --head HEAD --keys KEYS"


def command_lines(model: str, settings: PlanSettings, layout: Layout, memory: Memory, context: int) -> Iterator[str]:
    """What to do with it, and the command."""
    served = _served(model)
    nodes = layout.on_nodes(settings.machine.gpus_per_node)
    num_nodes = nodes.num_nodes if nodes is not None else 1
    where = "" if served is not None else f", with the folder that has the weights of {model} for MODEL"
    each = " on each node (docs/multi-node.md has RANK, HEAD and KEYS)" if num_nodes > 1 else ""
    yield f"Use{each}{where}:"
    start = f"plait launch {{}} --nnodes {num_nodes} {_NODE_FLAGS}" if num_nodes > 1 else "plait serve {}"
    words = [start.format(shlex.quote(served or "MODEL")), *_flags(settings.server, layout, memory, context)]
    yield "  " + " ".join(words)


def _served(model: str) -> str | None:
    """What `plait serve` takes for `model`; None if it is a file without weights beside it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return model
    has_weights = path.name == "config.json" and any(path.parent.glob("*.safetensors"))
    return str(path.parent) if has_weights else None


def _flags(server: PlanServerSettings, layout: Layout, memory: Memory, context: int) -> Iterator[str]:
    """Every setting that the plan was made with, and the longest context that the pool holds if it is shorter."""
    if layout.flags:
        yield layout.flags
    longest = min(context, memory.kv_tokens)
    if server.max_model_len is not None or longest < context:
        yield f"--max-model-len {longest}"
    default = PlanServerSettings()
    given: dict[str, str | float | None] = {
        "quantization": server.quantization,
        "kv_cache_dtype": server.kv_cache_dtype,
        "memory_fraction": server.memory_fraction,
        "page_size": server.page_size,
        "max_seqs": server.max_seqs,
        "max_batch_tokens": server.max_batch_tokens,
    }
    for name, value in given.items():
        if value != getattr(default, name):
            yield f"--{name.replace('_', '-')} {value}"
