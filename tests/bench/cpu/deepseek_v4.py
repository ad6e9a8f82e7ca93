"""DeepSeek-V4 on a CPU beside transformers, by a rank's own steps: prefill, decode, and what long contexts cost.

    PYTHONPATH=tests python tests/bench/cpu/deepseek_v4.py --out tests/bench/results/deepseek-v4-cpu.json

Random models of four layers (dense, CSA, HCA, CSA), with few weights and with more. Both sides compute the same tokens
in float32 in one process and on one thread, in turns; a figure is the median of the rounds. Times are the processor's,
so that other work on the machine counts little. transformers prefills by its default way to compute experts, and
decodes by each. The streams of a decode step have the same prompt, which transformers prefills once.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
CONTEXTS = (1024, PREFILL, 8192)


def prompt(length: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(1)).tolist()


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
        slot = stepper.admit(prompt(PREFILL))
        return seconds(lambda: stepper.generate(slot, 1, CHUNK))

    def decode(self, context: int, num_steps: int) -> float:
        """Seconds of a step of all streams, in the mean."""
        stepper = self.stepper(NUM_STREAMS, context + num_steps + 8)
        slots = [stepper.admit(prompt(context)) for _ in range(NUM_STREAMS)]
        for slot in slots:
            stepper.generate(slot, 1, CHUNK)
        stepper.step(decode=slots)
        return seconds(lambda: [stepper.step(decode=slots) for _ in range(num_steps)]) / num_steps


class Transformers:
    """The same model there."""

    def __init__(self, model: transformers.DeepseekV4ForCausalLM) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, length: int = PREFILL) -> tuple[float, Any]:
        """Seconds of one prompt, and what transformers made of it."""
        self.model.set_experts_implementation(DEFAULT_WAY)
        ids, given = torch.tensor([prompt(length)]), None

        def work() -> None:
            nonlocal given
            given = self.model(ids, use_cache=True, logits_to_keep=1)

        return seconds(work), given

    @torch.inference_mode()
    def decode(self, way: str, given: Any, num_steps: int = 8) -> float:
        """As ``Plait.decode`` behind that prompt: one batch, its cache as transformers keeps it."""
        self.model.set_experts_implementation(way)
        cache, ids = copy.deepcopy(given.past_key_values), given.logits[:, -1:].argmax(-1).repeat(NUM_STREAMS, 1)
        cache.reorder_cache(torch.zeros(NUM_STREAMS, dtype=torch.int64))

        def step() -> None:
            nonlocal ids
            ids = self.model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

        def steps() -> None:
            for _ in range(num_steps):
                step()

        step()
        return seconds(steps) / num_steps


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def said(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Times = dict[str, list[float]]


def measure(ours: Plait, theirs: Transformers, times: Times) -> None:
    """One round; the sides take turns."""
    for context in CONTEXTS:
        keep(times, f"plait decode {context}", ours.decode(context, 32))
        if context < PREFILL:
            seconds_taken, given = theirs.prefill(context)
        elif context == PREFILL:
            keep(times, "plait prefill", ours.prefill())
            seconds_taken, given = theirs.prefill()
            keep(times, "transformers prefill", seconds_taken)
        else:
            continue
        for way in WAYS_OF_EXPERTS:
            keep(times, f"transformers {way} {context}", theirs.decode(way, given))


def keep(times: Times, name: str, value: float) -> None:
    times.setdefault(name, []).append(value)
    said(f"{name}: {value:.4f} s")


def figures(every: Times, of: str) -> Iterator[Row]:
    """A row each, with the goals of the design."""
    times = {name: statistics.median(each) for name, each in every.items()}
    for side in ("plait", "transformers"):
        yield Row(f"{side}, prefill of {PREFILL}, {of}", "rate", "tokens/s", PREFILL / times[f"{side} prefill"])
    prefill = times["transformers prefill"] / times["plait prefill"]
    yield Row(f"prefill of {PREFILL}, {of}", "over_transformers", "1", prefill, 2.0)
    for context in CONTEXTS:
        case, ours = f"decode at {NUM_STREAMS} streams, context {context}, {of}", times[f"plait decode {context}"]
        yield Row(f"plait, {case}", "rate", "tokens/s", NUM_STREAMS / ours)
        for way in WAYS_OF_EXPERTS:
            if (theirs := times.get(f"transformers {way} {context}")) is not None:
                yield Row(f"transformers, {way} experts, {case}", "rate", "tokens/s", NUM_STREAMS / theirs)
                goal = 3.0 if way == DEFAULT_WAY else None
                yield Row(f"{case}, {way} experts", "over_transformers", "1", theirs / ours, goal)
    first, *_, last = (times[f"plait decode {context}"] for context in CONTEXTS)
    yield Row(f"decode at {NUM_STREAMS} streams, {of}", "cost_of_8192_over_1024", "1", last / first, 1.5)


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
        times: Times = {}
        for _ in range(asked.rounds):
            measure(ours, theirs, times)
        rows += figures(times, size)
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
