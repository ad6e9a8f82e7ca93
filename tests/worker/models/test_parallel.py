"""Several ranks together compute what one rank computes alone."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plait_proto import ExitCode
from plait_testing.attention_cases import cpu_attention
from plait_testing.rank_threads import on_every_rank
from plait_worker.attention.model_specs import attention_specs
from plait_worker.attention.spec import MhaShape
from plait_worker.cache import KVCache
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.fingerprint import check_same_files
from plait_worker.models.loader import dummy_model, load_model
from plait_worker.models.registry import read_config
from plait_worker.parallel import Parallel, Shard
from plait_worker.rows import Rows
from plait_worker.weights.fields import Fields

CPU = torch.device("cpu")
IDS = [5, 9, 2, 44, 17, 3, 60, 8, 1, 30]
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 4}
# Sharded heads: evenly, in uneven groups, one head on several ranks, and MLA.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", EVEN | {"attention_bias": True, "mlp_bias": True}),
    "llama of three groups": ("llama", {"num_key_value_heads": 3, "attention_bias": True}),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3 of three groups": ("qwen3", {"num_key_value_heads": 3}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "mistral": ("mistral", EVEN | {"sliding_window": 5}),
    "minimax_m2": ("minimax_m2", EVEN),
    "minimax_m2 of three groups": ("minimax_m2", {"num_key_value_heads": 3}),
    "minimax_m2 with one kv head": ("minimax_m2", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "deepseek_v2": ("deepseek_v2", EVEN | {"q_lora_rank": None, "attention_bias": True, "num_key_value_heads": 8}),
    "deepseek_v3": ("deepseek_v3", EVEN | {"num_key_value_heads": 8}),
}


def logits(path: Path, parallel: Parallel) -> torch.Tensor:
    """Of a prompt of 9 tokens in two chunks and one decode step."""
    model = load_model(path, "float32", CPU, parallel)
    cache = KVCache(model.cache_specs, 4, 4, CPU)
    attention = cpu_attention(model.attention_specs, 4, 4)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)

    def hidden(first: int, end: int, num_prefill: int) -> torch.Tensor:
        ids, positions, last = torch.tensor(IDS[first:end]), torch.arange(first, end), torch.tensor([end - first - 1])
        rows = Rows(num_prefill, [0], [first], [end - first], ids, positions, table, last)
        return model.forward(rows, cache, attention.prepare(rows))

    return model.logits(torch.cat((hidden(0, 6, 1), hidden(6, 9, 1), hidden(9, 10, 0))))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_compute_what_one_computes(
    name: str, world: int, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    family, changes = MODELS[name]
    path = save_tiny(family, **changes).path
    alone = logits(path, Parallel())
    for together in on_every_rank(world, tmp_path, lambda parallel: logits(path, parallel)):
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_three_ranks_with_two_key_value_heads_compute_what_one_computes(
    family: str, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """The last rank has no head of its own: it holds empty ones."""
    path = save_tiny(family, intermediate_size=96).path
    alone = logits(path, Parallel())
    for together in on_every_rank(3, tmp_path, lambda parallel: logits(path, parallel)):
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_ranks_with_different_files_are_rejected(save_tiny: Callable[..., Any], tmp_path: Path) -> None:
    one, other = save_tiny("llama", seed=1).path, save_tiny("llama", seed=2).path

    def compare(parallel: Parallel) -> str:
        check_same_files(one, parallel)
        try:
            check_same_files(one if parallel.rank == 0 else other, parallel)
        except ModelFilesError as error:
            return str(error)
        return ""

    reasons = on_every_rank(2, tmp_path, compare)
    assert all("the model files of rank 1 differ from those of rank 0" in reason for reason in reasons)


def test_a_rank_that_misses_another_says_so(tmp_path: Path) -> None:
    def leave_or_wait(parallel: Parallel) -> WorkerError | None:
        met.wait()  # whoever left before the other was connected would break the meeting instead
        try:
            while parallel.rank == 0:
                parallel.wait_for_all()
        except WorkerError as failure:
            return failure
        return None

    met = threading.Barrier(2, timeout=60)
    failure, _ = on_every_rank(2, tmp_path, leave_or_wait)
    assert failure is not None
    assert failure.code == ExitCode.RANK_LOST
    assert "another rank cannot be reached" in failure.reason


class NoGroup(dist.ProcessGroup):
    """Stands where no collective is called."""


def ranks(world: int) -> list[Parallel]:
    groups = [NoGroup(rank, world) for rank in range(world)]  # type: ignore[call-arg]  # the stub knows one of two forms
    return [Parallel(rank, world, group) for rank, group in enumerate(groups)]


def test_units_are_divided_evenly_and_in_order() -> None:
    assert [rank.shard(8) for rank in ranks(4)] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_neighbouring_ranks_hold_the_same_key_value_head_if_there_are_fewer() -> None:
    queries, kv = zip(*(rank.shard_heads(8, 2) for rank in ranks(4)), strict=True)
    assert queries == tuple(Shard(range(first, first + 2)) for first in (0, 2, 4, 6))
    assert kv == (Shard(range(0, 1)), Shard(range(0, 1)), Shard(range(1, 2)), Shard(range(1, 2)))


def test_groups_of_heads_stay_together_and_the_last_ranks_are_filled_up() -> None:
    assert [rank.shard_heads(9, 3) for rank in ranks(2)] == [
        (Shard(range(0, 6)), Shard(range(0, 2))),
        (Shard(range(6, 9), 3), Shard(range(2, 3), 1)),
    ]
    assert ranks(4)[3].shard_heads(9, 3) == (Shard(range(9, 9), 3), Shard(range(3, 3), 1))


def test_an_uneven_shard_is_rejected() -> None:
    with pytest.raises(ValueError, match="4 heads, rows or columns cannot be divided among 3 ranks"):
        ranks(3)[0].shard(4)


@pytest.mark.parametrize(
    ("family", "changes", "world", "reason"),
    [
        ("llama", {}, 3, r"MLP width \(intermediate_size\), 80; these values of --tp work: 1, 2, 4, 5"),
        ("llama", {}, 8, "more than the model's 6 attention heads"),
        ("qwen3_moe", {}, 5, r"experts' width \(moe_intermediate_size\), 24; these values of --tp work: 1, 2, 3, 4, 6"),
        ("deepseek_v3", {}, 4, r"attention heads \(num_attention_heads\), 6; these values of --tp work: 1, 2"),
    ],
)
def test_an_indivisible_tp_is_rejected_with_the_values_that_work(
    family: str, changes: dict[str, Any], world: int, reason: str, save_tiny: Callable[..., Any]
) -> None:
    path = save_tiny(family, **changes).path
    for load in (load_model, dummy_model):
        with pytest.raises(ValueError, match=f"--tp {world} .*{reason}"):
            load(path, "float32", CPU, ranks(world)[0])


def test_several_ranks_need_a_group() -> None:
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        Parallel(0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Parallel(2, 2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (40, 10), (32, 8), (8, 2), (9, 3)])
def test_the_kernels_that_are_built_ahead_are_those_of_a_rank_s_own_heads(num_heads: int, num_kv_heads: int) -> None:
    config = read_config(
        Fields(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 100,
                "hidden_size": 64 * num_heads,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_kv_heads,
            },
            "config.json",
        )
    )
    built = attention_specs(config, 0, 4, torch.bfloat16)[0]
    assert isinstance(built, MhaShape)
    for rank in ranks(4):
        heads, kv_heads = rank.shard_heads(num_heads, num_kv_heads)
        assert (built.num_heads, built.num_kv_heads) == (len(heads), len(kv_heads))
