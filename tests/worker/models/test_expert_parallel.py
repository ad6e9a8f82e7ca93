"""Replicas that share their experts compute what one replica computes alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from plait_kernels.collective import SentRows
from plait_proto import ExitCode
from plait_testing.attention_cases import cpu_attention
from plait_testing.rank_threads import MEET_SECONDS, gloo, on_every_rank
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.cache import KVCache
from plait_worker.errors import WorkerError
from plait_worker.expert_parallel import ExactExchange, Exchange, ExpertParallel, PaddedExchange, ReplicaRows
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

CPU = torch.device("cpu")
PAGE, NUM_PAGES = 4, 8
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "num_attention_heads": 8, "num_key_value_heads": 8},
    "deepseek_v3": {"num_attention_heads": 8, "num_key_value_heads": 8},
}
IDS = [5, 9, 2, 44, 17, 3, 60, 8, 1, 30, 12, 7]

T = TypeVar("T")
Chunks = Sequence[int]
"""Tokens of one replica in each step; 0 for a step without rows."""


@dataclass
class Loaded:
    """A model on one rank, with a request in slot 0 that gets the tokens of ``IDS``."""

    model: Model[Any]
    attention: ModelAttention
    cache: KVCache

    def hidden(self, first: int, num: int, replica: int) -> Tensor:
        """Of the next ``num`` tokens of the replica's own request; a dummy row if there are none."""
        ids = [(token + replica) % 60 for token in IDS[first : first + num]] or [0]
        start, pages = (first, [2, 0, 3, 1]) if num else (0, [NUM_PAGES] * 4)
        positions = torch.arange(start, start + len(ids))
        table = torch.tensor([pages], dtype=torch.int32)
        rows = Rows(
            num_prefill=int(num > 1),
            slots=[0],
            starts=[start],
            lengths=[len(ids)],
            token_ids_T=torch.tensor(ids),
            positions_T=positions,
            page_table_RW=table,
            sample_index_S=torch.tensor([len(ids) - 1]),
        )
        return self.model.forward(rows, self.cache, self.attention.prepare(rows))


def load(path: Path, parallel: Parallel) -> Loaded:
    model = load_model(path, "float32", CPU, parallel)
    return Loaded(
        model, cpu_attention(model.attention_specs, PAGE, PAGE), KVCache(model.cache_specs, NUM_PAGES, PAGE, CPU)
    )


def logits(path: Path, parallel: Parallel, replica: int, steps: Sequence[Chunks]) -> Tensor:
    """Of every token of the replica; ``steps`` has the chunks of each replica."""
    loaded, first, found = load(path, parallel), 0, list[Tensor]()
    for tokens in zip(*steps, strict=True):
        if parallel.experts is not None:
            parallel.experts.begin_step(tokens)
        own = tokens[replica]
        if own or parallel.experts is not None:
            hidden_TD = loaded.hidden(first, own, replica)
            found.append(loaded.model.logits(hidden_TD)[:own])
        first += own
    return torch.cat(found)


def in_group(
    num_replicas: int,
    tp: int,
    folder: Path,
    run: Callable[[Parallel], T],
    exchange: Callable[[Parallel], Exchange] = ExactExchange,
) -> list[T]:
    """What ``run`` returns on each rank of a group."""
    world = num_replicas * tp
    # A rank that ends closes its connections, which others may still be opening.
    all_met = threading.Barrier(world, timeout=MEET_SECONDS)

    def one(rank: int) -> T:
        replica, place = divmod(rank, tp)
        everyone = Parallel(rank, world, gloo(rank, world, dist.FileStore(str(folder / "all"), world)))
        within = gloo(place, tp, dist.FileStore(str(folder / f"of-{replica}"), tp)) if tp > 1 else None
        all_met.wait()
        experts = ExpertParallel(everyone, replica, num_replicas, exchange(everyone))
        return run(Parallel(place, tp, within, experts=experts))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def replica_of(parallel: Parallel) -> int:
    assert parallel.experts is not None
    return parallel.experts.replica


LAYOUTS = {
    "uneven rows": (2, 1, [[6, 1, 1, 3], [2, 7, 1, 1]]),
    "an idle replica": (2, 1, [[6, 1, 1], [0, 0, 0]]),
    "all rows on the last of four": (4, 1, [[0, 0], [0, 0], [0, 0], [9, 1]]),
    "four replicas": (4, 1, [[1, 1, 3], [8, 1, 1], [0, 5, 2], [4, 0, 1]]),
    "two ranks in each of two replicas": (2, 2, [[7, 1, 1, 2], [1, 3, 0, 1]]),
    "one replica of two ranks": (1, 2, [[7, 1, 2]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_replicas_that_share_experts_compute_what_one_computes(
    name: str, layout: str, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    num_replicas, tp, steps = LAYOUTS[layout]
    path = save_tiny(name, **MODELS[name]).path
    alone = [
        logits(path, Parallel(), replica, [[0] * len(steps[0])] * replica + [steps[replica]])
        if sum(steps[replica])
        else None
        for replica in range(num_replicas)
    ]

    def on_rank(parallel: Parallel) -> tuple[int, Tensor]:
        replica = replica_of(parallel)
        return replica, logits(path, parallel, replica, steps)

    for replica, together in in_group(num_replicas, tp, tmp_path, on_rank):
        expected = alone[replica]
        if expected is None:
            assert len(together) == 0
        else:
            torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_replicas", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_the_recall_model_gives_the_logits_of_one_rank(
    num_replicas: int, tp: int, check_models: Path, tmp_path: Path
) -> None:
    path, steps = check_models / "recall-mla", [[7, 1, 1], [2, 6, 1], [0, 3, 5], [1, 1, 1]][:num_replicas]
    alone = [
        logits(path, Parallel(), replica, [[0] * 3] * replica + [steps[replica]]) for replica in range(num_replicas)
    ]

    def on_rank(parallel: Parallel) -> tuple[int, Tensor]:
        return replica_of(parallel), logits(path, parallel, replica_of(parallel), steps)

    for replica, together in in_group(num_replicas, tp, tmp_path, on_rank):
        torch.testing.assert_close(together, alone[replica], atol=2e-3, rtol=1e-3)


def test_each_rank_reads_its_own_experts_and_no_others(save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    path = save_tiny("deepseek_v3", **MODELS["deepseek_v3"]).path
    names = [name for name in SafetensorsFolder(path).names if ".experts." in name]

    def experts_read(parallel: Parallel) -> int:
        return load_model(path, "float32", CPU, parallel).weight_bytes

    whole, of_ranks = experts_read(Parallel()), in_group(4, 1, tmp_path, experts_read)
    shapes = [SafetensorsFolder(path).shape(name) for name in names]
    expert_bytes = sum(4 * rows * columns for rows, columns in shapes)
    assert sum(of_ranks) == 4 * (whole - expert_bytes) + expert_bytes


@pytest.mark.parametrize("exchange", [ExactExchange, PaddedExchange])
@pytest.mark.parametrize("counts", [[3, 0, 1], [2, 2, 2], [0, 0, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_as_the_sum_of_the_ranks(
    exchange: Callable[[Parallel], Exchange], counts: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    def exchanged(parallel: Parallel) -> tuple[Tensor, Tensor]:
        via, num = exchange(parallel), counts[parallel.rank]
        rows = torch.full((num, 12), parallel.rank, dtype=torch.uint8)
        gathered = via.gather(rows, counts)
        partial = torch.arange(len(gathered) * 5, dtype=dtype).view(-1, 5) * (parallel.rank + 1)
        return gathered, via.reduce_scatter(partial, counts)

    width = max(counts) if exchange is PaddedExchange else None
    for rank, (gathered, sums) in enumerate(on_every_rank(3, tmp_path, exchanged)):
        padded = [[each] * num + [255] * ((width or num) - num) for each, num in enumerate(counts)]
        assert gathered.tolist() == [[each] * 12 for of_rank in padded for each in of_rank]
        first = sum(len(of_rank) for of_rank in padded[:rank])
        expected = torch.arange(len(gathered) * 5).view(-1, 5)[first : first + counts[rank]] * 6
        assert torch.equal(sums, expected.to(dtype))


def test_padding_reaches_no_expert(save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """The exchange for NCCL pads to the longest: those rows name no expert."""
    path, steps = save_tiny("deepseek_v3", **MODELS["deepseek_v3"]).path, [[6, 1], [1, 0]]
    alone = logits(path, Parallel(), 0, steps[:1])

    def on_rank(parallel: Parallel) -> Tensor:
        return logits(path, parallel, replica_of(parallel), steps)

    together, _ = in_group(2, 1, tmp_path, on_rank, PaddedExchange)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "num_replicas", "reason"),
    [
        ("qwen3_moe", {}, 2, r"has no multi-head latent attention \(MLA\); leave it out and serve free replicas"),
        ("llama", {}, 2, r"has no multi-head latent attention \(MLA\) and experts"),
        ("deepseek_v3", MODELS["deepseek_v3"], 9, r"9 ranks .* than the model's 8 experts.* set --dp times --tp to 8"),
        ("deepseek_v3", {"num_attention_heads": 6, "num_key_value_heads": 6}, 1, None),
    ],
)
def test_a_model_whose_replicas_cannot_share_is_refused(
    family: str, changes: dict[str, Any], num_replicas: int, reason: str | None, save_tiny: Callable[..., Any]
) -> None:
    path = save_tiny(family, **changes).path
    group = dist.ProcessGroup(0, num_replicas)  # type: ignore[call-arg]  # the stub knows one of two forms
    everyone = Parallel(0, num_replicas, group)
    parallel = Parallel(experts=ExpertParallel(everyone, 0, num_replicas, ExactExchange(everyone)))
    if reason is None:
        load_model(path, "float32", CPU, parallel)
        return
    with pytest.raises(ValueError, match=reason):
        load_model(path, "float32", CPU, parallel)


@pytest.mark.parametrize(
    ("num_experts", "world", "shares"), [(8, 2, [4, 4]), (8, 3, [2, 3, 3]), (64, 4, [16] * 4), (5, 4, [1, 1, 1, 2])]
)
def test_uneven_shares_differ_by_one_expert_at_most(num_experts: int, world: int, shares: list[int]) -> None:
    groups = [dist.ProcessGroup(rank, world) for rank in range(world)]  # type: ignore[call-arg]
    ranks = [
        ExpertParallel(Parallel(rank, world, group), rank, world, ExactExchange(Parallel()))
        for rank, group in enumerate(groups)
    ]
    held = [each.own_experts(num_experts) for each in ranks]
    assert [len(each) for each in held] == shares
    assert [expert for each in held for expert in each] == list(range(num_experts))


def test_a_decision_for_another_group_or_of_more_tokens_than_the_plan_is_a_bug() -> None:
    group = dist.ProcessGroup(0, 2)  # type: ignore[call-arg]
    shared = ExpertParallel(Parallel(0, 2, group), 0, 2, ExactExchange(Parallel()))
    with pytest.raises(WorkerError, match="counts the tokens of 3 replicas; the group has 2") as raised:
        shared.begin_step([1, 2, 3])
    assert raised.value.code == ExitCode.BUG
    shared.begin_step([5, 0])
    with pytest.raises(WorkerError, match="more tokens of this replica than its plan has"):
        shared.rows(4)


class Told:
    """Takes the place of an exchange over peers' memory, and keeps what it is told of steps."""

    def __init__(self) -> None:
        self.steps: list[SentRows] = []

    def begin_step(self, sent: SentRows) -> None:
        self.steps.append(sent)


def test_the_exchange_over_peers_memory_is_told_which_rows_are_tokens() -> None:
    """Prompts and decode rows of a captured step have padding behind them."""
    group = dist.ProcessGroup(0, 2)  # type: ignore[call-arg]
    shared, told = ExpertParallel(Parallel(0, 2, group), 0, 2, ExactExchange(Parallel())), Told()
    shared.peers.exchange = told  # type: ignore[assignment]
    shared.begin_step([70, 3], ReplicaRows(num_first=64, second_begin=512, num_second=6))
    assert shared.room(544) == 70
    shared.begin_step([0, 3], ReplicaRows(num_first=0))
    assert shared.room(1) == 3
    shared.begin_step(None, ReplicaRows(num_first=9))
    assert shared.room(9) == 9
    assert told.steps == [SentRows([70, 3], 64, 512), SentRows([0, 3], 0, 0), SentRows([9, 9], 9, 0)]
    with pytest.raises(WorkerError, match="counts 5 tokens of this replica, and its plan has 4") as raised:
        shared.begin_step([5, 3], ReplicaRows(num_first=4))
    assert raised.value.code == ExitCode.BUG
