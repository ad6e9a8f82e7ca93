"""Two ranks together compute what one rank computes alone."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plait_worker.attention.cpu import cpu_attention
from plait_worker.cache import KVCache
from plait_worker.models import load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows

CPU = torch.device("cpu")
IDS = [5, 9, 2, 44, 17, 3, 60, 8, 1, 30]


def logits(path: Path, parallel: Parallel) -> torch.Tensor:
    """Of a prompt of 9 tokens and one decode step."""
    model = load_model(path, "float32", CPU, parallel)
    cache = KVCache(model.cache_spec, 4, 4, CPU)
    attention = cpu_attention(model.attention_shape, 4, 4)
    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
    last = torch.tensor([0])
    prompt = Rows(1, [0], [0], [9], torch.tensor(IDS[:9]), torch.arange(9), table, torch.tensor([8]))
    token = Rows(0, [0], [9], [1], torch.tensor(IDS[9:]), torch.tensor([9]), table, last)
    hidden = torch.cat([model.forward(rows, cache, attention.prepare(rows)) for rows in (prompt, token)])
    return model.logits(hidden)


def run_rank(rank: int, world: int, store: str, path: Path, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    result = logits(path, Parallel(rank, world, dist.group.WORLD))
    result.numpy().tofile(f"{out}-{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "changes", "world"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("qwen3_moe", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 1}, 2),
    ],
)
def test_ranks_together_compute_what_one_computes(
    family: str, changes: dict[str, Any], world: int, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    path = save_tiny(family, **changes).path
    alone = logits(path, Parallel())
    mp.spawn(run_rank, (world, str(tmp_path / "store"), path, str(tmp_path / "out")), nprocs=world)
    for rank in range(world):
        shared = torch.from_file(str(tmp_path / f"out-{rank}"), size=alone.numel()).view(alone.shape)
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


class NoGroup(dist.ProcessGroup):
    """Stands where no collective is called."""


def shares(num_units: int, world: int) -> list[range]:
    groups = [NoGroup(rank, world) for rank in range(world)]  # type: ignore[call-arg]  # the stub knows one of two forms
    return [Parallel(rank, world, group).share(num_units) for rank, group in enumerate(groups)]


def test_units_are_divided_evenly_and_in_order() -> None:
    assert shares(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_neighbouring_ranks_hold_the_same_head_where_there_are_fewer() -> None:
    assert shares(2, 4) == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]


def test_what_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(ValueError, match="4 heads, rows or columns cannot be divided among 3 ranks"):
        shares(4, 3)


def test_several_ranks_need_a_group() -> None:
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        Parallel(0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Parallel(2, 2)
