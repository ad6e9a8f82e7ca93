"""Latent attention through flashinfer's own call checks and a stand-in of the kernels' contract, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from plait_kernels.kv_cache import FP8
from plait_testing.attention_cases import CPU, MlaCase, Tables, mla_shape
from plait_testing.trtllm_gen import Launcher, statistics_bytes
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MlaShape

if TYPE_CHECKING:
    from plait_worker.attention.mla.trtllm_mla import TrtllmMla

# Long rows with and without context, then short ones that are absorbed.
PREFILL = [(0, 100), (300, 70), (0, 65), (200, 66), (5, 3), (0, 1), (90, 40)]
DECODE = [(start, 1) for start in (0, 1, 31, 32, 33, 500)]
# bfloat16 rounds to 2**-8, float8 to 2**-4.
TOLERANCE, FLOAT8_TOLERANCE = 0.02, 0.06


def backend(shape: MlaShape, page_size: int = 32, mla_context_chunk_size: int = 64) -> TrtllmMla:
    from plait_worker.attention.mla.trtllm_mla import TrtllmMla

    return TrtllmMla(BackendRequirements(shape, page_size, mla_context_chunk_size, 1024, CPU))


@pytest.mark.parametrize(("page_size", "mla_context_chunk_size"), [(32, 64), (64, 250), (32, 4096)])
def test_rows_of_every_sort_attend_to_their_own_past(
    launcher: Launcher, page_size: int, mla_context_chunk_size: int
) -> None:
    shape = mla_shape()
    case = MlaCase(shape, PREFILL, DECODE, page_size)
    assert case.error(backend(shape, page_size, mla_context_chunk_size)) <= TOLERANCE
    kinds = {"decompressed causal", "decompressed context", "mla ragged", "mla decode"}
    assert set(launcher.calls) == kinds


@pytest.mark.parametrize("shape", [mla_shape(128), mla_shape(20), mla_shape(4, latent_dim=256, query_dim=128)])
def test_the_kernels_other_sizes(launcher: Launcher, shape: MlaShape) -> None:
    assert MlaCase(shape, [(40, 66), (0, 2)], DECODE[:3]).error(backend(shape)) <= TOLERANCE


@pytest.mark.parametrize(
    ("lengths", "kind"), [([1, 1, 1], "mla decode"), ([3, 3, 3], "mla decode"), ([2, 4, 1], "mla ragged")]
)
def test_decode_rows_may_have_several_tokens(launcher: Launcher, lengths: list[int], kind: str) -> None:
    shape = mla_shape()
    case = MlaCase(shape, [], list(zip((0, 63, 130), lengths, strict=True)))
    assert case.error(backend(shape)) <= TOLERANCE
    assert launcher.calls == {kind: 1}


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_float8_pages_with_their_scale(launcher: Launcher, scale: float) -> None:
    shape = mla_shape(cached_dtype=FP8, cached_scale=scale)
    assert MlaCase(shape, PREFILL, DECODE).error(backend(shape)) <= FLOAT8_TOLERANCE


def test_short_appends_before_a_long_prompt_are_absorbed(launcher: Launcher) -> None:
    made = backend(shape := mla_shape())
    case = MlaCase(shape, [(300, 7), (90, 70), (200, 64), (0, 2), (5, 100)], DECODE)
    assert made.prepare(case.tables.rows).num_prefill_tokens == 70 + 100
    assert case.error(made) <= TOLERANCE


def test_rows_whose_statistics_outgrow_the_workspace_go_in_several_calls(launcher: Launcher) -> None:
    made = backend(mla_shape(128))
    rows = Tables([(row % 3, 65 + row % 7) for row in range(1200)], [], page_size=32).rows
    runs = [group.new.run for group in made.prepare(rows).groups]
    assert [row for run in runs for row in run.rows] == list(range(1200))
    assert len(runs) == 3
    for run in runs:
        assert statistics_bytes(128, run.q_lengths) <= made.scratch.workspace.nbytes


def test_rows_in_several_calls_give_the_same(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(shape := mla_shape())
    monkeypatch.setattr(made, "_fits", lambda num_rows, longest: num_rows <= 2)
    assert MlaCase(shape, PREFILL, []).error(made) <= TOLERANCE
    assert launcher.calls["decompressed causal"] == 2


def test_steps_of_one_backend_follow_each_other(launcher: Launcher) -> None:
    made = backend(shape := mla_shape())
    for decode in (DECODE[:2], DECODE, DECODE[1:4]):
        assert MlaCase(shape, [], decode).error(made) <= TOLERANCE


def test_what_a_captured_step_takes_comes_from_the_device(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(shape := mla_shape())
    case = MlaCase(shape, [], DECODE)
    monkeypatch.setattr("plait_worker.transfer.torch.from_numpy", lambda values: pytest.fail("an upload"))
    assert case.error(made) <= TOLERANCE
    assert made.is_capturable
    assert torch.equal(made.scratch.counters, torch.zeros_like(made.scratch.counters))
