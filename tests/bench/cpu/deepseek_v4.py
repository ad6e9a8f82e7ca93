"""DeepSeek-V4 on a CPU beside transformers, by a rank's own steps: prefill, decode, and what long contexts cost.

    PYTHONPATH=tests python tests/bench/cpu/deepseek_v4.py --out tests/bench/results/deepseek-v4-cpu.json

Random models of four layers (dense, CSA, HCA, CSA), with few weights and with more. Both sides compute the same tokens
in float32 in one process and on one thread, in turns; a figure is the median of the rounds. Times are the processor's,
so that other work on the machine counts little. transformers prefills by the faster of its ways to compute experts, and
decodes by each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from plait.bench.result_file import Row, commit, machine, versions
from plait_kernels.cpu.library import set_num_threads
from plait_testing.attention_cases import cpu_attention
from plait_testing.deepseek_v4 import CSA, DENSE, HCA, YARN, random_v4
from plait_testing.stepper import Stepper
from plait_worker.cache import KVCache
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.slot_state import StateSizes
from plait_worker.slots import Slots

CPU = torch.device("cpu")
LIBRARIES = ("plait", "torch", "transformers")
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 128,
    "q_lora_rank": 512,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "sliding_window": 128,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 64,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 16384,
    "compress_rates": {CSA: 4, HCA: 128},
    "layer_types": [DENSE, CSA, HCA, CSA],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "rope_parameters": YARN,
}
SIZES: dict[str, dict[str, Any]] = {
    "few weights": {"vocab_size": 1024, "moe_intermediate_size": 256},
    "more weights": {"vocab_size": 32768, "moe_intermediate_size": 512},
}
"""Both sides read every weight in a decode step: the more there are, the nearer they come to each other."""
WAYS_OF_EXPERTS = ("eager", "grouped_mm")
DEFAULT_WAY = "grouped_mm"
"""Of transformers; its third copies the weights for each token."""
PAGE, CHUNK = 256, 2048
PREFILL, NUM_STREAMS = 4096, 8
CONTEXTS = (1024, 8192)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Plait:
    """One rank, stepped by plans."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, "float32", CPU, Parallel())

    def stepper(self, num_slots: int, num_tokens: int) -> Stepper:
        """Fresh caches for so many requests of ``num_tokens``."""
        num_pages, most = num_slots * -(-num_tokens // PAGE), CHUNK + num_slots
        rank = Rank(
            model=self.model,
            cache=KVCache(self.model.cache_specs, num_pages, PAGE, CPU, StateSizes(num_slots, most, 1)),
            attention=cpu_attention(self.model.attention_specs, PAGE, PAGE, most),
            slots=Slots(num_slots, num_pages, PAGE, num_tokens, CPU),
            parallel=Parallel(),
        )
        return Stepper(rank.step, PAGE, num_pages)

    def prefill(self) -> float:
        """Seconds of one prompt, in chunks."""
        stepper = self.stepper(1, PREFILL + 8)
        slot = stepper.admit(prompt(PREFILL, 1))
        return seconds(lambda: stepper.generate(slot, 1, CHUNK))

    def decode(self, context: int, num_steps: int) -> float:
        """Seconds of a step of all streams, in the mean."""
        stepper = self.stepper(NUM_STREAMS, context + num_steps + 8)
        slots = [stepper.admit(prompt(context, seed)) for seed in range(NUM_STREAMS)]
        for slot in slots:
            stepper.generate(slot, 1, CHUNK)
        stepper.step(decode=slots)
        return seconds(lambda: [stepper.step(decode=slots) for _ in range(num_steps)]) / num_steps


class Transformers:
    """The same model there."""

    def __init__(self, model: transformers.DeepseekV4ForCausalLM) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, length: int = PREFILL) -> float:
        ids = torch.tensor([prompt(length, 1)])
        return seconds(lambda: self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1))

    @torch.inference_mode()
    def decode(self, way: str, context: int, num_steps: int) -> float:
        """As ``Plait.decode``: one batch, its cache as transformers keeps it."""
        self.model.set_experts_implementation(way)
        given = self.model(
            torch.tensor([prompt(context, seed) for seed in range(NUM_STREAMS)]), use_cache=True, logits_to_keep=1
        )

        def step() -> None:
            nonlocal given
            ids = given.logits[:, -1:].argmax(-1)
            given = self.model(ids, past_key_values=given.past_key_values, use_cache=True)

        step()
        return seconds(lambda: [step() for _ in range(num_steps)]) / num_steps

    def prefill_by_faster_way(self) -> float:
        """As ``Plait.prefill``."""
        self.model.set_experts_implementation(self._faster_way)
        return self.prefill()

    @cached_property
    def _faster_way(self) -> str:
        times = {}
        for way in WAYS_OF_EXPERTS:
            self.model.set_experts_implementation(way)
            times[way] = self.prefill(CONTEXTS[0])
            said(f"transformers' experts by {way}: {times[way]:.2f} s")
        return min(times, key=lambda way: times[way])


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def said(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(ours: Plait, theirs: Transformers, num_rounds: int) -> dict[str, float]:
    """Medians, in seconds; the sides take turns."""
    short, long = CONTEXTS
    works: dict[str, Callable[[], float]] = {
        "plait prefill": ours.prefill,
        "transformers prefill": theirs.prefill_by_faster_way,
        "plait decode": lambda: ours.decode(short, 32),
        **{f"transformers {way}": partial(theirs.decode, way, short, 8) for way in WAYS_OF_EXPERTS},
        "plait decode deep": lambda: ours.decode(long, 32),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds):
        for name, work in works.items():
            times[name].append(work())
            said(f"{name}: {times[name][-1]:.4f} s")
    return {name: statistics.median(each) for name, each in times.items()}


def figures(times: dict[str, float], of: str) -> Iterator[Row]:
    """A row each, with the goals of the design."""
    prefill, decode = f"prefill of {PREFILL}, {of}", f"decode at {NUM_STREAMS} streams, context {CONTEXTS[0]}, {of}"
    for side in ("plait", "transformers"):
        yield Row(f"{side}, {prefill}", "rate", "tokens/s", PREFILL / times[f"{side} prefill"])
    yield Row(prefill, "over_transformers", "1", times["transformers prefill"] / times["plait prefill"], 2.0)
    ours = times["plait decode"]
    yield Row(f"plait, {decode}", "rate", "tokens/s", NUM_STREAMS / ours)
    for way in WAYS_OF_EXPERTS:
        theirs = times[f"transformers {way}"]
        yield Row(f"transformers, {way} experts, {decode}", "rate", "tokens/s", NUM_STREAMS / theirs)
        goal = 3.0 if way == DEFAULT_WAY else None
        yield Row(f"{decode}, {way} experts", "over_transformers", "1", theirs / ours, goal)
    yield Row(
        f"decode at {NUM_STREAMS} streams, {of}", "cost_of_8192_over_1024", "1", times["plait decode deep"] / ours, 1.5
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    begun_at = commit()
    torch.set_num_threads(1)
    set_num_threads(1)
    rows: list[Row] = []
    for size in asked.sizes:
        reference = random_v4("real ratios", **SHAPE, **SIZES[size])
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            ours, theirs = Plait(Path(folder)), Transformers(reference)
        rows += figures(measured(ours, theirs, asked.rounds), size)
    for row in rows:
        said(f"{row.case}, {row.metric}: {row.value:,.2f}")
    record = {
        "commit": begun_at,
        "command": f"python {' '.join(sys.argv)}",
        "machine": machine(),
        "versions": versions(LIBRARIES),
        "rows": rows,
    }
    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


if __name__ == "__main__":
    main()
