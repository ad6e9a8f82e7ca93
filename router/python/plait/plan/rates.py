"""Expected step times and rates: the production scheduler over a roofline, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from plait._router import Simulation
from plait.plan.gpus import Gpu
from plait.plan.layout import Layout, Memory
from plait.plan.model import PlannedModel
from plait.plan.settings import PlanLoadSettings
from plait.plan.simulated import SimulatedModel
from plait.settings import PageSettings, SchedulerSettings
from plait.simulate.report import Report, Summary
from plait.simulate.settings import ClusterSettings, LoadSettings, SimulateSettings, simulator_settings

_AT_ONCE = 1e6
"""Requests a second: all are there from the start, and so many run at a time."""
_TURNS = 4
"""Requests of each stream, one after the other."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Of all replicas together, prefix cache off."""

    output_tokens_per_second: float
    itl_p50: float
    itl_p99: float
    """Seconds."""


class Expectations:
    """What a model on one kind of GPU should reach."""

    def __init__(self, model: PlannedModel, gpu: Gpu, scratch: Path) -> None:
        """What the simulator reads is written into `scratch`."""
        self._model, self._gpu, self._scratch = model, gpu, scratch

    def at(self, layout: Layout, memory: Memory, load: PlanLoadSettings) -> Expected:
        """So many streams in a closed loop, divided among the replicas."""
        if not layout.dp_attention:
            layout = Layout(layout.tp, min(layout.dp, load.streams))
        running = min(-(-load.streams // layout.dp), memory.sizes.max_seqs)
        summary = self._run(layout, memory, load, running, _TURNS * running * layout.dp)
        # Replicas run equally many; of streams that do not divide evenly, some slots stay empty.
        used = min(1.0, load.streams / (running * layout.dp))
        rate = summary.output_tokens_per_second * used
        return Expected(rate, summary.itl_seconds.p50, summary.itl_seconds.p99)

    def first_token_seconds(self, layout: Layout, memory: Memory, load: PlanLoadSettings) -> float:
        """Of a request that meets an idle server, HTTP and tokenising left out."""
        alone = Layout(layout.tp, layout.dp if layout.dp_attention else 1, layout.dp_attention)
        return self._run(alone, memory, load, 1, 1).ttft_seconds.p50

    def _run(self, layout: Layout, memory: Memory, load: PlanLoadSettings, running: int, num_prompts: int) -> Summary:
        simulated = SimulatedModel(self._model, self._gpu, layout.held(self._model), running)
        settings = SimulateSettings(
            load=LoadSettings(
                rate=_AT_ONCE, num_prompts=num_prompts, input_len=load.input_len, output_len=load.output_len
            ),
            cluster=ClusterSettings(
                replicas=layout.dp,
                tp=layout.tp,
                dp_attention=layout.dp_attention,
                hardware=self._written("gpu.json", simulated.rates()),
                model=self._written("model.json", simulated.config()),
                max_model_len=load.input_len + load.output_len,
                threads=1,
            ),
            scheduler=SchedulerSettings(
                max_batch_tokens=memory.sizes.max_batch_tokens,
                max_seqs=running,
                max_queue=num_prompts,
                max_queue_tokens=num_prompts * load.input_len,
            ),
            pages=PageSettings(
                num_pages=memory.num_pages, page_size=memory.page_size, memory_fraction=1.0, prefix_cache=False
            ),
        )
        simulation = Simulation(msgspec.json.encode(simulator_settings(settings)))
        return msgspec.json.decode(simulation.run(lambda _: None), type=Report).summary

    def _written(self, name: str, content: dict[str, Any]) -> str:
        path = self._scratch / name
        path.write_bytes(msgspec.json.encode(content))
        return str(path)
