"""Attention to keys and values through flashinfer's own call checks and a stand-in of the kernels' contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plait_testing.attention_cases import CPU, MhaCase, mha_shape
from plait_testing.trtllm_gen import Launcher
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MhaShape

if TYPE_CHECKING:
    from plait_worker.attention.mha.trtllm_gen_mha import TrtllmGenMha

PREFILL = [(0, 100), (300, 70), (0, 1), (31, 33), (64, 2)]
DECODE = [(start, 1) for start in (0, 1, 15, 16, 63, 64, 500)]
TOLERANCE = 0.02


def backend(shape: MhaShape, page_size: int = 32) -> TrtllmGenMha:
    from plait_worker.attention.mha.trtllm_gen_mha import TrtllmGenMha

    return TrtllmGenMha(BackendRequirements(shape, page_size, 0, 1024, CPU))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_rows_of_every_sort_attend_to_their_own_past(launcher: Launcher, page_size: int) -> None:
    shape = mha_shape()
    assert MhaCase(shape, PREFILL, DECODE, page_size).error(backend(shape, page_size)) <= TOLERANCE
    assert launcher.calls == {"mha context": 1, "mha decode": 1}


@pytest.mark.parametrize("shape", [mha_shape(8, 8, 64), mha_shape(5, 1, 128), mha_shape(12, 2, 256)])
def test_the_kernels_other_sizes(launcher: Launcher, shape: MhaShape) -> None:
    assert MhaCase(shape, PREFILL[:2], DECODE[:3]).error(backend(shape)) <= TOLERANCE


@pytest.mark.parametrize(("lengths", "kind"), [([3, 3, 3], "mha decode"), ([2, 4, 1], "mha ragged")])
def test_decode_rows_may_have_several_tokens(launcher: Launcher, lengths: list[int], kind: str) -> None:
    shape = mha_shape()
    case = MhaCase(shape, [(10, 70)], list(zip((0, 63, 130), lengths, strict=True)))
    assert case.error(backend(shape)) <= TOLERANCE
    assert launcher.calls[kind] == 1
