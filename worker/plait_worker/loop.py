"""The loop: take a plan, apply what changed, build rows, forward, sample, answer.

Shapes: T tokens of the step, D the hidden size, S rows that sample, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from plait_proto import Bye, Plan, StepResult, encode
from torch import Tensor

from plait_worker.attention import AttentionBackend
from plait_worker.batch import build_rows, prompt_targets
from plait_worker.cache import KVCache
from plait_worker.delta import Delta, read_plan
from plait_worker.link import Link
from plait_worker.models import Model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.sample import output_records, prompt_records, sample
from plait_worker.slots import Slots

_log = logging.getLogger(__name__)


def run(link: Link, rank: Rank) -> None:
    """Compute and answer plans until Drain. Raises ``Failure`` where a plan or the link is broken."""
    for plan in link.plans():
        result = rank.step(plan)
        if rank.answers(plan):
            link.send(encode(result))
        link.finished(plan.step)
    _log.info("drained: %s", rank.totals)
    link.send(encode(Bye(rank=rank.parallel.rank, num_steps=rank.totals.num_steps)))


@dataclass(slots=True)
class Totals:
    """What a rank has done since it started; the warm-up counts."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    """Steps with rows of both kinds."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed."""
    num_decode_rows: int = 0
    num_head_rows: int = 0
    """Rows of the output head that tokens were sampled from."""

    def count(self, rows: Rows) -> None:
        """Add one step."""
        num_decode_rows = rows.num_rows - rows.num_prefill
        self.num_steps += 1
        self.num_mixed_steps += rows.num_prefill > 0 and num_decode_rows > 0
        self.num_prefill_tokens += rows.num_prefill_tokens
        self.num_decode_rows += num_decode_rows
        self.num_head_rows += rows.sample_index_S.shape[0]


@dataclass(frozen=True, slots=True)
class Rank:
    """A model with its cache and its slots."""

    model: Model[Any]
    cache: KVCache
    attention: AttentionBackend[Any]
    """Of the kind that the model attends by."""
    slots: Slots
    parallel: Parallel
    totals: Totals = field(default_factory=Totals)

    def answers(self, plan: Plan) -> bool:
        """Every rank answers the warm-up; of later plans only the first rank's result is needed."""
        return plan.step == 0 or self.parallel.rank == 0

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepResult:
        """Compute the plan. Raises ``Failure`` where it does not fit what the rank holds."""
        began_ns = time.perf_counter_ns()
        delta = read_plan(plan)
        self.slots.apply(delta)
        self.slots.advance(delta)
        rows = build_rows(delta, self.slots, self.model.config.vocab_size)
        self.totals.count(rows)
        if rows.num_rows == 0:
            return _result(plan.step, began_ns)
        hidden_TD = self.model.forward(rows, self.cache, self.attention.prepare(rows))
        ids_S, logprobs = self._sample(hidden_TD, rows, delta)
        prompt_logprobs = prompt_records(hidden_TD, self.model.logits, prompt_targets(delta, self.slots))
        return _result(plan.step, began_ns, ids_S, logprobs, prompt_logprobs)

    def _sample(self, hidden_TD: Tensor, rows: Rows, delta: Delta) -> tuple[Tensor, bytes]:
        """A token for each last chunk and each decode row, picked by rank 0; the head never sees another row."""
        index_S = rows.sample_index_S
        if index_S.shape[0] == 0:
            return index_S, b""
        slots_S = delta.slots_R[delta.samples_R]
        device_slots_S = self.slots.to_device(slots_S)
        logits_SV = self.model.logits(hidden_TD[index_S])
        is_first = self.parallel.rank == 0
        picked_S = sample(logits_SV, slots_S, device_slots_S, self.slots.sampling) if is_first else index_S.clone()
        ids_S = self.parallel.broadcast(picked_S)
        self.slots.keep_tokens(device_slots_S, ids_S)
        return ids_S, output_records(logits_SV, ids_S, slots_S, self.slots.sampling) if is_first else b""


def _result(
    step: int, began_ns: int, ids_S: Tensor | None = None, logprobs: bytes = b"", prompt_logprobs: bytes = b""
) -> StepResult:
    ids = np.zeros(0, dtype="<i4") if ids_S is None else ids_S.to(torch.int32).cpu().numpy()
    return StepResult(
        step=step,
        elapsed_us=(time.perf_counter_ns() - began_ns) // 1000,
        num_accepted=np.ones(len(ids), dtype="<u4").tobytes(),
        token_ids=ids.tobytes(),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
