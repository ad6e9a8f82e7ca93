"""A step: take a plan, apply what changed, build rows, forward, sample, answer.

A GPU gets the next plan while it computes this one: ``launch`` hands it a step's work, ``InFlight.result`` waits for
the outcome. On a CPU a step is over when ``launch`` returns.

Shapes: T tokens of the step, D the hidden size, S rows that sample, V vocabulary, U a rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from plait_proto import FAILED_ROW, Decision, ExitCode, Plan, StepMasks, StepResult
from torch import Tensor

from plait_worker.attention.model_attention import ModelAttention
from plait_worker.batch import build_rows, prompt_targets
from plait_worker.cache import KVCache
from plait_worker.errors import WorkerError, ensure
from plait_worker.expert_parallel import ReplicaRows
from plait_worker.graphs import StepGraph, StepGraphs
from plait_worker.masks import RowMasks, SampledRows
from plait_worker.models.model import Model
from plait_worker.nvtx import nvtx_range
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.sample import Records, output_records, prompt_records, sample
from plait_worker.slots import Slots
from plait_worker.step_inputs import Bools, Ints, StepInputs, dummy_step, read_plan
from plait_worker.transfer import DeviceEvent, Download


@dataclass(slots=True)
class Totals:
    """Counters since the rank started, the warm-up included."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    """Steps with rows of both kinds."""
    num_graph_steps: int = 0
    """Steps that were one replay of a captured graph."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed."""
    num_decode_rows: int = 0
    num_head_rows: int = 0
    """Rows of the output head that tokens were sampled from."""

    def count(self, inputs: StepInputs) -> None:
        """Add one step."""
        num_decode_rows = len(inputs.slots_R) - inputs.num_prefill
        self.num_steps += 1
        self.num_mixed_steps += inputs.num_prefill > 0 and num_decode_rows > 0
        self.num_prefill_tokens += inputs.num_tokens - num_decode_rows
        self.num_decode_rows += num_decode_rows
        self.num_head_rows += int(inputs.samples_R.sum())


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched."""

    step: int
    begin: DeviceEvent
    """CUDA event recorded before the step's first kernel."""
    ids: Download
    """int32, of the rows that sampled."""
    output_records: Sequence[Records]
    prompt_records: Sequence[Records]
    end: DeviceEvent
    pooled: Download | None = None
    """float32, of the pooled prompts that end."""
    left_out_S: Bools | None = None
    """Rows that sampled nothing; None if all sampled."""

    def is_over(self) -> bool:
        """Whether ``result`` returns at once."""
        return self.end.is_reached()

    def result(self) -> StepResult:
        """What the step sampled; waits for it."""
        self.end.wait()
        ids = self.ids.array()
        accepts_S = np.ones(len(ids), dtype="<u4") if self.left_out_S is None else (~self.left_out_S).astype("<u4")
        return StepResult(
            step=self.step,
            elapsed_us=self.end.us_since(self.begin),
            num_accepted=accepts_S.tobytes(),
            # NO_TOKEN of the kernels has the bits of FAILED_ROW.
            token_ids=ids.tobytes(),
            logprobs=b"".join(records.frame() for records in self.output_records),
            prompt_logprobs=b"".join(records.frame() for records in self.prompt_records),
            pooled=b"" if self.pooled is None else self.pooled.array().tobytes(),
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """A step whose forward was launched and whose tokens are still to be sampled."""

    step: int
    begin: DeviceEvent
    inputs: StepInputs
    logits_SU: Tensor
    graph: StepGraph | None
    prompt_records: Sequence[Records]
    pooled_VD: Tensor | None
    end: DeviceEvent

    @property
    def slots_S(self) -> Ints:
        """Slots of the rows that sample."""
        return self.inputs.slots_R[self.inputs.samples_R]

    @property
    def num_last_chunks(self) -> int:
        """Rows that sample the first token behind a prompt; they are the first ones."""
        return int(self.inputs.samples_R[: self.inputs.num_prefill].sum())


@dataclass(frozen=True, slots=True)
class Rank:
    """A model with its cache and its slots."""

    model: Model[Any]
    cache: KVCache
    attention: ModelAttention
    slots: Slots
    parallel: Parallel
    graphs: StepGraphs = field(default_factory=StepGraphs)
    totals: Totals = field(default_factory=Totals)

    def sends_result(self, plan: Plan) -> bool:
        """Every rank answers the warm-up (step 0); after it only rank 0 does."""
        return plan.step == 0 or self.parallel.rank == 0

    def step(self, plan: Plan) -> StepResult:
        """Compute the plan and wait for it. Raises ``WorkerError`` if it contradicts the rank's state."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """Hand the plan's work to the device. Raises ``WorkerError`` if it contradicts the rank's state."""
        with nvtx_range(f"step: {plan.num_prefill} prefill and {plan.num_decode} decode rows"):
            begin = DeviceEvent(self.slots.device)
            inputs, graph = self._take(plan)
            if graph is not None:
                return self._replay(graph, plan.step, begin, inputs)
            if plan.decision is not None and len(inputs.slots_R) == 0:
                inputs = dummy_step(inputs, self.slots.dummy_slot)
            return self._run_eager(plan.step, begin, inputs)

    @torch.inference_mode()
    def launch_forward(self, plan: Plan) -> Forward:
        """Hand a plan's forward to the device; its masks come later. Raises ``WorkerError`` as ``launch`` does."""
        with nvtx_range(f"forward: {plan.num_prefill} prefill and {plan.num_decode} decode rows"):
            begin = DeviceEvent(self.slots.device)
            inputs, graph = self._take(plan)
            if graph is not None:
                self.totals.num_graph_steps += 1
                logits_SU, of_prompts, pooled_VD = graph.replay(inputs), list[Records](), None
            else:
                rows = self._rows(inputs)
                hidden_TD = self._hidden(rows)
                logits_SU = self.model.shard_logits(hidden_TD[rows.sample_index_S])
                of_prompts = self._prompt_records(inputs, hidden_TD)
                pooled_VD = self.slots.pooled.vectors(inputs, hidden_TD)
            end = DeviceEvent(self.slots.device)
            return Forward(plan.step, begin, inputs, logits_SU, graph, of_prompts, pooled_VD, end)

    @torch.inference_mode()
    def sample(self, forward: Forward, messages: Sequence[StepMasks]) -> InFlight:
        """Hand the device the rest of a step whose masks are here. Raises ``WorkerError`` if they do not fit it."""
        slots_S = forward.slots_S
        rows = self.slots.sampling.masks.read(messages, len(slots_S))
        ensure(bool(rows.left_out_S[slots_S == self.slots.dummy_slot].all()), "a row samples behind one that did not")
        if rows.is_free() and forward.graph is not None and self.slots.sampling.is_plain(slots_S):
            ids_S, records = forward.graph.sample(len(slots_S)), list[Records]()
        else:
            ids_S, records = self._sample_kept(forward, rows)
        left_out_S = rows.left_out_S if rows.left_out_S.any() else None
        return self._in_flight(
            forward.step, forward.begin, ids_S, records, forward.prompt_records, left_out_S, forward.pooled_VD
        )

    def _sample_kept(self, forward: Forward, rows: SampledRows) -> tuple[Tensor, list[Records]]:
        """Sample the rows that are not left out; the others are computed again."""
        slots_S, logits_SU, masks = forward.slots_S, forward.logits_SU, rows.masks
        if rows.left_out_S.any():
            self._leave_out(forward, rows.left_out_S)
            kept = np.flatnonzero(~rows.left_out_S)
            slots_S, logits_SU, masks = slots_S[kept], logits_SU[self.slots.to_device(kept)], masks.of_rows(kept)
        if len(slots_S) == 0:
            return self.slots.to_device(slots_S), []
        return self._sample(logits_SU, slots_S, masks if masks.is_masked_S.any() else None)

    def _leave_out(self, forward: Forward, left_out_S: Bools) -> None:
        of_requests_S = left_out_S & (forward.slots_S != self.slots.dummy_slot)
        num_last_chunks = int(of_requests_S[: forward.num_last_chunks].sum())
        self.slots.leave_out(forward.slots_S[of_requests_S], num_last_chunks)

    def _take(self, plan: Plan) -> tuple[StepInputs, StepGraph | None]:
        """Apply what changed; the step's rows, and the graph that replays them, if there is one."""
        with nvtx_range("plan"):
            inputs = read_plan(plan)
            self.slots.apply(inputs)
            inputs = self.slots.divert_void_rows(inputs)
            self.slots.advance(inputs)
            self.cache.restore(inputs.restored_X2)
            self.cache.check_snapshots(inputs.saved_X3[:, 2])
            self.totals.count(inputs)
            graph = self._graph(plan.decision, inputs)
            self._begin_exchange(plan.decision, inputs, graph)
            return inputs, graph

    def _begin_exchange(self, decision: Decision | None, inputs: StepInputs, graph: StepGraph | None = None) -> None:
        """Say what the replicas that share experts compute; without a decision all compute alike."""
        if self.parallel.experts is not None:
            tokens = None if decision is None else np.frombuffer(decision.tokens, dtype="<u4")[1::2].tolist()
            self.parallel.experts.begin_step(tokens, _replica_rows(inputs, graph))

    def _graph(self, decision: Decision | None, inputs: StepInputs) -> StepGraph | None:
        """The graph that replays the step; in a group the decision says of how many tokens, for all replicas."""
        if decision is None:
            return self.graphs.find_graph(inputs, self.slots)
        return None if decision.graph_bucket is None else self.graphs.of_tokens(decision.graph_bucket, inputs)

    def _replay(self, graph: StepGraph, step: int, begin: DeviceEvent, inputs: StepInputs) -> InFlight:
        """A step as one graph of forward and head."""
        self.totals.num_graph_steps += 1
        slots_S = inputs.slots_R[inputs.samples_R]
        with nvtx_range("graph"):
            logits_SU = graph.replay(inputs)
            if len(slots_S) == 0:  # a dummy row's step
                return self._in_flight(step, begin, self.slots.to_device(slots_S), [])
            if self.slots.sampling.is_plain(slots_S):
                return self._in_flight(step, begin, graph.sample(len(slots_S)), [])
        ids_S, records = self._sample(logits_SU, slots_S)
        return self._in_flight(step, begin, ids_S, records)

    @torch.inference_mode()
    def try_step(self, inputs: StepInputs) -> None:
        """Compute a step of empty slots without a graph, alike on all replicas; its samples are dropped."""
        self._begin_exchange(None, inputs)
        self._run_eager(0, DeviceEvent(self.slots.device), inputs).result()

    def _run_eager(self, step: int, begin: DeviceEvent, inputs: StepInputs) -> InFlight:
        """A step without a graph."""
        rows = self._rows(inputs)
        if rows.num_rows == 0:
            return self._in_flight(step, begin, rows.sample_index_S, [])
        hidden_TD = self._hidden(rows)
        ids_S, records = rows.sample_index_S, list[Records]()
        if ids_S.shape[0]:  # the head never sees a row that does not sample
            logits_SU = self.model.shard_logits(hidden_TD[rows.sample_index_S])
            ids_S, records = self._sample(logits_SU, inputs.slots_R[inputs.samples_R])
        pooled_VD = self.slots.pooled.vectors(inputs, hidden_TD)
        of_prompts = self._prompt_records(inputs, hidden_TD)
        return self._in_flight(step, begin, ids_S, records, of_prompts, pooled_VD=pooled_VD)

    def _rows(self, inputs: StepInputs) -> Rows:
        with nvtx_range("rows"):
            return build_rows(inputs, self.slots, self.model.config.vocab_size)

    def _hidden(self, rows: Rows) -> Tensor:
        """(tokens, hidden) behind the last layer, without a graph."""
        with nvtx_range("forward"):
            return self.model.forward(rows, self.cache, self.attention.prepare(rows))

    def _prompt_records(self, inputs: StepInputs, hidden_TD: Tensor) -> list[Records]:
        return prompt_records(hidden_TD, self.model.logits, prompt_targets(inputs, self.slots))

    def _sample(self, logits_SU: Tensor, slots_S: Ints, masks: RowMasks | None = None) -> tuple[Tensor, list[Records]]:
        """A token for each row, the next step's input."""
        with nvtx_range("sample"):
            device_slots_S, table = self.slots.to_device(slots_S), self.slots.sampling
            records = list[Records]()
            if logits_SU.is_cuda and masks is None and table.is_plain(slots_S):
                ids_S = self.model.greedy_ids(logits_SU)
            elif self.parallel.world > 1 and not table.wants_logprobs(slots_S):
                ids_S = self._sample_own_rows(logits_SU, slots_S, device_slots_S, masks)
            else:
                ids_S, records = self._sample_on_first_rank(logits_SU, slots_S, device_slots_S, masks)
            self.slots.keep_tokens(device_slots_S, ids_S)
            table.count_adjusted(slots_S, ids_S)
            return ids_S, records

    def _sample_own_rows(
        self, logits_SU: Tensor, slots_S: Ints, device_slots_S: Tensor, masks: RowMasks | None
    ) -> Tensor:
        """Every rank samples its share of the rows; the tokens are those of one rank that samples all."""
        own = self.parallel.own_rows(len(slots_S))
        rows = slice(own.start, own.stop)
        own_CV = self.model.own_rows_of_logits(logits_SU)
        ids_C = device_slots_S.new_zeros(len(own_CV))
        if own:
            own_masks = None if masks is None else masks.of_rows(rows)
            own_ids = sample(own_CV[: len(own)], slots_S[rows], device_slots_S[rows], self.slots.sampling, own_masks)
            ids_C[: len(own)] = own_ids
        ids_S = self.parallel.all_gather(ids_C)[: len(slots_S)]
        return ids_S

    def _sample_on_first_rank(
        self, logits_SU: Tensor, slots_S: Ints, device_slots_S: Tensor, masks: RowMasks | None
    ) -> tuple[Tensor, list[Records]]:
        """Rank 0 samples for all, from whole logits, and makes the records of those who want log-probabilities."""
        logits_SV, table = self.model.whole_logits(logits_SU), self.slots.sampling
        is_first = self.parallel.rank == 0
        sampled_S = sample(logits_SV, slots_S, device_slots_S, table, masks) if is_first else device_slots_S.clone()
        ids_S = self.parallel.broadcast(sampled_S)
        return ids_S, output_records(logits_SV, ids_S, slots_S, table) if is_first else []

    def check_warm_up(self, result: StepResult) -> None:
        """Raise ``WorkerError`` if the model computes NaN or infinity from its first step on."""
        if FAILED_ROW not in np.frombuffer(result.token_ids, dtype="<u4"):
            return
        is_widest = self.model.dtype == torch.float32
        raise WorkerError(
            ExitCode.MODEL_FILES,
            f"the model ({self.model.config.architecture} in {str(self.model.dtype).removeprefix('torch.')}) computes "
            "NaN or infinity instead of logits: its files are damaged, or its values overflow the type; download it "
            f"again{'' if is_widest else ', or serve it with --dtype float32'}",
        )

    def _in_flight(
        self,
        step: int,
        begin: DeviceEvent,
        ids_S: Tensor,
        of_outputs: Sequence[Records],
        of_prompts: Sequence[Records] = (),
        left_out_S: Bools | None = None,
        pooled_VD: Tensor | None = None,
    ) -> InFlight:
        with nvtx_range("download"):
            ids = Download(ids_S.to(torch.int32))
            pooled = None if pooled_VD is None else Download(pooled_VD)
            end = DeviceEvent(self.slots.device)
            return InFlight(step, begin, ids, of_outputs, of_prompts, end, pooled, left_out_S)


def _replica_rows(inputs: StepInputs, graph: StepGraph | None) -> ReplicaRows:
    """Where the step's tokens are among the rows that are computed: a graph pads its prompts and its decode rows."""
    if graph is None:
        return ReplicaRows(inputs.num_tokens)
    num_decode = len(inputs.slots_R) - inputs.num_prefill
    return ReplicaRows(inputs.num_tokens - num_decode, graph.size.prompt_tokens, num_decode)
