"""Ranks compare what their collectives depend on before they compute; what differs is named."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plait_kernels.collective.peer_all_reduce import Lost
from plait_proto import ExitCode
from plait_testing.rank_threads import on_every_rank
from plait_worker.agreement import check_agreement, describe_uneven_pages
from plait_worker.device import check_num_gpus, device_facts
from plait_worker.errors import WorkerError
from plait_worker.parallel import Parallel
from plait_worker.peers import Peers
from plait_worker.rendezvous import WITHOUT_MULTICAST


def refusals(facts: list[dict[str, str]], folder: Path) -> list[WorkerError | None]:
    def check(parallel: Parallel) -> WorkerError | None:
        try:
            check_agreement(facts[parallel.rank], parallel)
        except WorkerError as refused:
            return refused
        return None

    return on_every_rank(len(facts), folder, check)


def test_equal_ranks_agree(tmp_path: Path) -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts["device"] == "cpu"
    assert refusals([facts, facts, facts], tmp_path) == [None, None, None]


def test_gpus_of_two_kinds_are_refused_on_every_rank_with_what_differs(tmp_path: Path) -> None:
    facts = [{"torch": "2", "GPU": name} for name in ("NVIDIA H100", "NVIDIA H200")]
    for refused in refusals([facts[0], facts[1] | {"NCCL": "2.28"}], tmp_path):
        assert refused is not None
        assert refused.code == ExitCode.HARDWARE
        assert refused.reason.startswith(
            "the 2 ranks of --tp differ in 2 of 3 things: GPU: NVIDIA H100 on rank 0, NVIDIA H200 on rank 1; "
            "NCCL: none on rank 0, 2.28 on rank 1. They must be the same on all"
        )


def test_replicas_that_share_experts_are_told_by_what_they_differ(tmp_path: Path) -> None:
    def check(parallel: Parallel) -> str:
        facts = {"--max-seqs": str(8 * (1 + parallel.rank)), "dtype": "float32"}
        with pytest.raises(WorkerError) as refused:
            check_agreement(facts, dataclasses.replace(parallel, setting="of --dp-attention"))
        return refused.value.reason

    for reason in on_every_rank(2, tmp_path, check):
        assert reason.startswith(
            "the 2 ranks of --dp-attention differ in 1 of 2 things: --max-seqs: 8 on rank 0, 16 on rank 1"
        )


def test_a_line_tells_of_ranks_whose_pages_differ_by_more_than_a_twentieth() -> None:
    assert describe_uneven_pages([100, 95, 100]) is None
    line = describe_uneven_pages([100, 94])
    assert line is not None
    assert "100 on rank 0, 94 on rank 1; every rank takes 94. Free the memory of rank 1's GPU to use 6 more" in line


@pytest.mark.parametrize(("world", "dp", "num_gpus"), [(1, 1, 1), (2, 1, 2), (2, 1, 8), (2, 4, 8)])
def test_every_rank_has_a_gpu(world: int, dp: int, num_gpus: int) -> None:
    check_num_gpus(world, dp, num_gpus)


def test_more_ranks_than_gpus_are_refused_with_what_works() -> None:
    with pytest.raises(
        WorkerError, match=r"--tp 4 needs 4 GPUs, one a rank, and 2 are visible; set --tp to 2"
    ) as error:
        check_num_gpus(4, 1, 2)
    assert error.value.code == ExitCode.HARDWARE


def test_more_replicas_than_gpus_are_refused_with_what_works() -> None:
    with pytest.raises(
        WorkerError, match=r"--dp 4 with --tp 2 needs 8 GPUs.* 4 are visible; set them so that --dp times --tp is 4"
    ):
        check_num_gpus(2, 4, 4)


def test_a_worker_never_uses_multicast_whatever_the_user_s_environment_says() -> None:
    code = (
        "import subprocess; from plait_worker.rendezvous import forbid_multicast; forbid_multicast(); "
        "subprocess.run(['env'], check=True)"
    )
    allowing = os.environ | dict.fromkeys(WITHOUT_MULTICAST, "yes please")
    done = subprocess.run([sys.executable, "-c", code], env=allowing, capture_output=True, text=True, check=True)
    for name, value in (
        ("NCCL_NVLS_ENABLE", "0"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ("NVSHMEM_DISABLE_NVLS", "1"),
    ):
        assert f"{name}={value}" in done.stdout.splitlines()


class LostPeer:
    """What a peer all-reduce looks like whose rank waited in vain in its seventh launch."""

    lost = Lost(rank=1, peer=3, launch=6, place=1)


def test_a_lost_peer_is_named_with_the_layer_that_waited() -> None:
    peers = Peers()
    peers.check()
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        peers.add_place(name)
    waited = r"rank 1 waited in vain for rank 3 in collective 6, before model\.layers\.0\.post_attention_"
    peers.all_reduce = LostPeer()  # type: ignore[assignment]  # as far as `check` looks
    with pytest.raises(WorkerError, match=waited) as error:
        peers.check()
    assert error.value.code == ExitCode.RANK_LOST
