"""A captured step with prompts gives what the same step gives when its kernels are launched one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plait_proto import Plan, StepResult
from plait_testing.gpu_driver import GPU, PAGE_SIZE, save_deepseek
from plait_testing.stepper import Stepper
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.selection import try_backend
from plait_worker.batch import build_rows
from plait_worker.cache import KVCache
from plait_worker.graph_sizes import GraphSize, capture_sizes
from plait_worker.graphs import Captured, StepGraphs, capture
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.slots import Slots
from plait_worker.step_inputs import read_plan
from plait_worker.weights.cache_scales import Fp8Cache
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-mla")]
NUM_PAGES, NUM_SLOTS, MAX_MODEL_LEN, VOCAB = 900, 40, 16_384, 2048
LONGEST = 9000
# Of the largest logit: GEMMs of other sizes round in another order, absorbed queries at another place, and float8
# rounds what a prompt's new tokens see of each other where they are absorbed alone.
TOLERANCE, TOLERANCE_FP8 = 0.05, 0.2


@dataclass
class BothWays:
    """Computes each plan by itself and by the graph that fits it; the tokens are the former's."""

    model: Model[Any]
    attention: ModelAttention
    errors: dict[GraphSize, list[float]] = field(default_factory=dict)
    num_eager: int = 0

    def __post_init__(self) -> None:
        self.cache = KVCache(self.model.cache_specs, NUM_PAGES, PAGE_SIZE, GPU)
        self.slots = Slots(NUM_SLOTS, NUM_PAGES, PAGE_SIZE, MAX_MODEL_LEN, GPU)
        self.graphs = self._capture()

    def _capture(self) -> StepGraphs:
        prompts = self.attention.captured_prefill
        assert prompts is not None
        wanted = capture_sizes(NUM_SLOTS, 8192, prompts.contexts)
        logits = torch.empty(max(size.num_rows for size in wanted), VOCAB, dtype=torch.bfloat16, device=GPU)
        return capture(wanted, Captured(self.slots, self._compute, self.model.greedy_ids, logits, VOCAB, prompts))

    def _compute(self, rows: Rows, logits: Tensor) -> None:
        hidden = self.model.forward(rows, self.cache, self.attention.prepare(rows))
        self.model.shard_logits(hidden[rows.sample_index_S], logits)

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepResult:
        inputs = read_plan(plan)
        self.slots.apply(inputs)
        self.slots.advance(inputs)
        rows = build_rows(inputs, self.slots, VOCAB)
        hidden = self.model.forward(rows, self.cache, self.attention.prepare(rows))
        right = self.model.shard_logits(hidden[rows.sample_index_S]).float()
        if (graph := self.graphs.find_graph(inputs, self.slots)) is None:
            self.num_eager += 1
        else:
            given = graph.replay(inputs).float()
            self.errors.setdefault(graph.size, []).append(float((given - right).abs().max() / right.abs().max()))
        ids = right.argmax(dim=-1)
        self.slots.keep_tokens(self.slots.to_device(inputs.slots_R[inputs.samples_R]), ids)
        token_ids = ids.cpu().numpy().astype("<u4")
        num_accepted = np.ones(len(token_ids), dtype="<u4").tobytes()
        return StepResult(plan.step, 1, num_accepted, token_ids.tobytes(), b"", b"")


def serve_prompts(stepper: Stepper, choose: random.Random, num_steps: int) -> None:
    """Prompts of up to 9,000 tokens come, are computed in chunks beside one another and beside decoding, and go."""
    for _ in range(num_steps):
        waiting = [slot for slot, request in stepper.requests.items() if request.num_left]
        decoding = [slot for slot, request in stepper.requests.items() if not request.num_left]
        for slot in [slot for slot in decoding if len(stepper.requests[slot].output) > 12]:
            stepper.free(slot)
            decoding.remove(slot)
        leased = sum(len(request.prompt) for request in stepper.requests.values())
        if len(stepper.requests) < 24 and leased < 40_000:
            length = choose.choice([choose.randint(1, 200), choose.randint(200, 2000), choose.randint(2000, LONGEST)])
            waiting.append(stepper.admit(choose.choices(range(VOCAB), k=length)))
        if not decoding and not waiting:
            continue
        most = choose.choice([1, 2, 5])
        chunk = choose.choice([17, 256, 700, 1500])
        chunks = {slot: min(stepper.requests[slot].num_left, chunk) for slot in waiting[:most]}
        stepper.step(prefill=chunks, decode=decoding)


@pytest.mark.parametrize(
    ("num_heads", "mla_context_chunk_size", "fp8"),
    [(16, 4096, None), (16, 256, None), (128, 4096, None), (16, 4096, Fp8Cache(0.37, 1.0))],
)
def test_replayed_prompts_have_the_logits_of_steps_launched_kernel_by_kernel(
    num_heads: int, mla_context_chunk_size: int, fp8: Fp8Cache | None, tmp_path: Path
) -> None:
    save_deepseek(tmp_path, num_heads, None)
    model = load_model(tmp_path, "bfloat16", GPU, Parallel(), fp8=fp8)
    attention = try_backend(
        "flashmla", BackendRequirements(model.attention_specs[0], PAGE_SIZE, mla_context_chunk_size, 8192, GPU)
    )
    assert not isinstance(attention, str), attention
    both = BothWays(model, ModelAttention([attention]))
    serve_prompts(Stepper(both.step, PAGE_SIZE, NUM_PAGES), random.Random(num_heads + mla_context_chunk_size), 150)
    planned = {size: errors for size, errors in both.errors.items() if size.context_tokens is not None}
    # Two pieces of 256 tokens are room for few steps' context.
    assert sum(map(len, planned.values())) > (0 if mla_context_chunk_size < 4096 else 20), (planned, both.num_eager)
    assert mla_context_chunk_size < 4096 or len({size.context_tokens for size in planned}) > 2
    tolerance = TOLERANCE if fp8 is None else TOLERANCE_FP8
    wrong = {size: max(errors) for size, errors in both.errors.items() if max(errors) > tolerance}
    assert wrong == {}
