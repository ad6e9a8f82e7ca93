"""A backend is chosen if it passes the self-check; else the reason is given."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_kernels.kv_cache import FP8, PageScales
from plait_testing.rank_threads import on_every_rank
from plait_worker.attention import selection
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mha import triton_mha
from plait_worker.attention.mha.separate_kernels import DecodeRows
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.mha.triton_mha import TritonMha
from plait_worker.attention.mla.self_check import MlaSelfCheck
from plait_worker.attention.selection import choose_backend, self_check_error, try_backend
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.errors import WorkerError
from torch import Tensor

SHAPE = MhaShape(4, 2, 16, 16**-0.5, torch.bfloat16)
LATENTS = MlaShape(4, 32, 40, 24, 12, 24**-0.5, torch.bfloat16, torch.bfloat16)
NEED: BackendRequirements[Any] = BackendRequirements(SHAPE, 16, 0, 64, torch.device("cpu"))
NUM_TOKENS = 1024


@pytest.fixture(autouse=True)
def _on_hopper_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait_worker.attention.selection.compute_capability", lambda _device: (9, 0))
    monkeypatch.setattr("plait_worker.attention.selection.find_nvcc", lambda: None)
    monkeypatch.setattr(triton_mha, "has_fmha_v2", lambda _shape: False)


@pytest.mark.parametrize("shape", [SHAPE, LATENTS], ids=["mha", "mla"])
def test_a_cpu_attends_by_compiled_kernels_unless_torch_is_asked_for(shape: MhaShape | MlaShape) -> None:
    requirements = dataclasses.replace(NEED, spec=shape, mla_context_chunk_size=64)
    assert choose_backend("auto", requirements).name == "cpu"
    assert choose_backend("torch", requirements).name == "torch"


class Foul(TritonMha):
    """Puts one number everywhere."""

    number = float("nan")

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, _scales: PageScales) -> None:
        out_DHE.fill_(self.number)


class Empty(Foul):
    number = 0.0


class FoulAlone(TritonMha):
    """Foul for one row."""

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, scales: PageScales) -> None:
        super().decode(q_DHE, pages, rows, out_DHE, scales)
        if len(q_DHE) == 1:
            out_DHE.fill_(Foul.number)


class Breaks(TritonMha):
    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, _scales: PageScales) -> None:
        raise RuntimeError("too many resources\nand more lines")


class Slower(TritonMha):
    """Second in the registry, and yet the fastest on the first rank."""

    name = "trtllm_mha"


def made(kind: type[TritonMha]) -> TritonMha:
    return kind(dataclasses.replace(NEED, max_tokens=NUM_TOKENS))


def test_our_kernels_attend_both_sorts_of_rows_where_nothing_can_be_compiled() -> None:
    assert isinstance(try_backend("triton", NEED), TritonMha)


def test_float8_pages_are_read_where_nothing_can_be_compiled() -> None:
    requirements = dataclasses.replace(NEED, spec=dataclasses.replace(SHAPE, is_fp8=True))
    assert isinstance(try_backend("triton", requirements), TritonMha)


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_smallest_pages_have_room_for_the_small_problem(page_size: int) -> None:
    requirements = dataclasses.replace(NEED, page_size=page_size)
    assert self_check_error(TorchMha(requirements), requirements) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Foul, "its result is off by nan"),
        (FoulAlone, "its result is off by nan"),
        (Empty, "its result is off by "),
        (Breaks, "it failed the self-check: too many resources"),
    ],
)
def test_a_backend_that_is_wrong_is_out_with_the_reason(kind: type[TritonMha], reason: str) -> None:
    wrong = self_check_error(made(kind), NEED)
    assert wrong is not None
    assert wrong.startswith(reason)
    assert "\n" not in wrong


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize(
    ("right", "tried"),
    [(["triton"], ["triton", "trtllm_mha"]), ([], ["triton", "trtllm_mha", "flashinfer"])],
    ids=["one is captured", "none is right"],
)
def test_what_plans_on_the_host_is_tried_only_where_nothing_can_be_captured(
    right: list[str], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def try_backend(name: str, _requirements: BackendRequirements[Any]) -> TritonMha | str:
        asked.append(name)
        return made(TritonMha) if name in right else "it does not run"

    monkeypatch.setattr(selection, "try_backend", try_backend)
    monkeypatch.setattr(selection, "_time", lambda backend, _requirements: selection.Timing(backend, 1, 1, 1, 1))
    chosen = choose_backend("auto", dataclasses.replace(NEED, device=torch.device("cuda", 0)))
    assert asked == tried
    assert chosen.name == (right or ["torch"])[0]


class Planned(TritonMha):
    is_capturable = False


@pytest.mark.parametrize(
    ("first", "second", "kind", "chosen"),
    [
        (109, 100, TritonMha, "triton"),
        (111, 100, TritonMha, "trtllm_mha"),
        (100, 90, TritonMha, "trtllm_mha"),
        (100, 200, TritonMha, "triton"),
        (100, 100, Planned, "trtllm_mha"),
    ],
)
def test_auto_takes_the_first_of_those_that_are_about_as_fast(
    first: float, second: float, kind: type[TritonMha], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, type[TritonMha]] = {"triton": kind, "trtllm_mha": Slower}
    times = {"triton": first, "trtllm_mha": second}
    monkeypatch.setattr(
        selection, "try_backend", lambda name, _: made(kinds[name]) if name in kinds else "it is another"
    )
    monkeypatch.setattr(selection, "_time", lambda backend, _: selection.Timing(backend, 0, 0, 0, times[backend.name]))
    assert choose_backend("auto", dataclasses.replace(NEED, device=torch.device("cuda", 0))).name == chosen


def test_all_ranks_take_the_backend_that_the_first_one_measured_as_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' own measurements differ: the first one's is the slower kernel for the second."""
    levels = {logging.INFO: Slower, logging.DEBUG: TritonMha}

    def fastest(_requirements: BackendRequirements[Any], level: int) -> TritonMha:
        return levels[level](dataclasses.replace(NEED, max_tokens=NUM_TOKENS))

    def try_backend(name: str, _requirements: BackendRequirements[Any], *, may_compile: bool) -> TritonMha | str:
        assert may_compile
        return made(Slower) if name == Slower.name else "it is another"

    monkeypatch.setattr(selection, "_fastest", fastest)
    monkeypatch.setattr(selection, "try_backend", try_backend)
    requirements = dataclasses.replace(NEED, device=torch.device("cuda", 0))
    chosen = on_every_rank(3, tmp_path, lambda parallel: choose_backend("auto", requirements, parallel).name)
    assert chosen == ["trtllm_mha"] * 3


@pytest.mark.parametrize(
    ("head_dim", "page_size", "rule"),
    [
        (24, 16, "its head_dim must be a power of two from 16 on, not 24"),
        (8, 16, "its head_dim must be a power of two from 16 on, not 8"),
        (16, 8, "its page size must be a power of two from 16 on, not 8; set --page-size 64"),
    ],
)
def test_sizes_that_our_kernel_does_not_take_are_refused_with_its_rule(
    head_dim: int, page_size: int, rule: str
) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    assert try_backend("triton", dataclasses.replace(NEED, spec=shape, page_size=page_size)) == rule


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize(
    ("head_dim", "page_size", "rule"),
    [
        (128, 8, "its kernels take pages of 16, 32, 64 or 128 tokens, not 8; set --page-size 64"),
        (128, 256, "its kernels take pages of 16, 32, 64 or 128 tokens, not 256; set --page-size 64"),
        (100, 64, "its head_dim must be a multiple of 16 up to 256, not 100"),
        (512, 64, "its head_dim must be a multiple of 16 up to 256, not 512"),
    ],
)
def test_sizes_that_xqa_does_not_take_are_refused_with_its_rule(head_dim: int, page_size: int, rule: str) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    assert try_backend("trtllm_mha", dataclasses.replace(NEED, spec=shape, page_size=page_size)) == rule


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize("name", ["triton", "trtllm_mha", "flashinfer"])
def test_a_sliding_window_is_refused_by_name_on_a_gpu(name: str) -> None:
    requirements = dataclasses.replace(NEED, spec=dataclasses.replace(SHAPE, window=4096))
    with pytest.raises(WorkerError, match=rf"{name}: its kernels have no sliding window .*4096 tokens\); take torch"):
        choose_backend(name, requirements)
    assert choose_backend("auto", requirements).name == "torch"


@pytest.mark.usefixtures("flashinfer_there")
def test_flashinfers_planned_kernels_refuse_float8_pages() -> None:
    requirements = dataclasses.replace(NEED, spec=dataclasses.replace(SHAPE, is_fp8=True))
    assert "use triton or trtllm_mha for --kv-cache-dtype fp8" in str(try_backend("flashinfer", requirements))


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"latent_dim": 256, "cached_dim": 320}, "it takes a kv_lora_rank of 512 with 64 rope dims, not 256 with 64"),
        ({"value_dim": 64}, "its prefill takes bfloat16 with 192 query dims and 128 value dims, not bfloat16 with 192"),
        ({"num_heads": 12}, "do not divide 128; use flashmla or another --tp"),
    ],
    ids=["rank", "values", "heads"],
)
def test_a_rule_that_is_broken_is_told_before_its_modules_are_looked_for(changes: dict[str, Any], rule: str) -> None:
    shape = MlaShape(16, 512, 576, 192, 128, 192**-0.5, torch.bfloat16, torch.bfloat16)
    requirements = BackendRequirements(dataclasses.replace(shape, **changes), 64, 4096, 8192, NEED.device)
    assert rule in str(try_backend("flashinfer_mla", requirements))


DEEPSEEK = MlaShape(16, 512, 576, 192, 128, 192**-0.5, torch.bfloat16, torch.bfloat16)
SMALL_HEADS = dataclasses.replace(DEEPSEEK, num_heads=1)
MLA_NEED: BackendRequirements[Any] = BackendRequirements(DEEPSEEK, 64, 4096, 8192, torch.device("cpu"))


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_latent_kernels_are_checked_with_more_rows_than_multiprocessors(page_size: int) -> None:
    from plait_worker.attention.mla.triton_mla import TritonMla

    requirements = dataclasses.replace(MLA_NEED, spec=SMALL_HEADS, page_size=page_size)
    step = TritonMla(requirements).prepare(MlaSelfCheck(requirements).extends)
    assert step.num_prefill_tokens == 0
    assert step.absorbed is not None
    assert len(step.absorbed.lengths_B) > 132, "of an H200"


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize(
    ("changes", "page_size", "rule"),
    [
        ({}, 48, "its page size must be a power of two from 16 on, not 48; set --page-size 64"),
        ({}, 8, "its page size must be a power of two from 16 on, not 8; set --page-size 64"),
        ({"cached_dtype": FP8}, 64, "its kernel reads no float8 pages; use flashmla or flashinfer_mla"),
        ({"latent_dim": 256, "cached_dim": 320}, 64, "it takes a kv_lora_rank of 512 with 64 rope dims, not 256"),
        ({"value_dim": 64}, 64, "its prefill takes bfloat16 with 192 query dims and 128 value dims, not bfloat16"),
    ],
)
def test_what_our_latent_kernel_does_not_take_is_refused_with_its_rule(
    changes: dict[str, Any], page_size: int, rule: str
) -> None:
    shape = dataclasses.replace(DEEPSEEK, **changes)
    requirements = dataclasses.replace(MLA_NEED, spec=shape, page_size=page_size)
    with pytest.raises(WorkerError, match="--attention-backend triton_mla: " + re.escape(rule)):
        choose_backend("triton_mla", requirements)
