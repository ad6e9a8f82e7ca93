"""Every latent backend against float64: scattered pages, lengths around page edges, chunks, pages far into the pool."""

import dataclasses
from typing import Any

import pytest
import torch
from plait_kernels.kv_cache import FP8
from plait_testing.attention_cases import MlaCase, Spans, mla_shape
from plait_testing.gpu_driver import GPU, PAGE_SIZE
from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MlaShape

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-mla")]
BACKENDS = names(MlaShape.kind, (9, 0))
# Queries, keys and softmax weights are bfloat16 in every backend. Over float8 FlashMLA rounds queries and weights to it
# too, and a prompt's new tokens attend to each other unrounded.
TOLERANCE, TOLERANCE_FP8 = 0.02, 0.1
MAX_TOKENS = 8192
DECODE = [(start, 1) for start in (0, 1, 62, 63, 64, 65, 127, 128, 129, 1000)]
SHORT = [(start, length) for start in (0, 1, 63, 64, 500) for length in (1, 2, 40, 65)]
# Rows with a long context between rows with none, rows that fill context chunks exactly, and short extends.
LONG = [(0, 300), (256, 500), (0, 1), (1000, 3), (1000, 700), (512, 1), (0, 65)]


def backend_for(name: str, shape: MlaShape, mla_context_chunk_size: int) -> AttentionBackend[Any]:
    if name == "torch":
        return TorchMla(BackendRequirements(shape, PAGE_SIZE, mla_context_chunk_size, MAX_TOKENS, GPU))
    outcome = try_backend(name, BackendRequirements(shape, PAGE_SIZE, mla_context_chunk_size, MAX_TOKENS, GPU))
    assert not isinstance(outcome, str), outcome
    return outcome


def case(shape: MlaShape, prefill: Spans, decode: Spans, num_pages: int = 0) -> MlaCase:
    return MlaCase(shape, prefill, decode, PAGE_SIZE, GPU, num_pages)


@pytest.mark.parametrize("mla_context_chunk_size", [256, 4096])
@pytest.mark.parametrize("num_heads", [8, 16, 128])
@pytest.mark.parametrize("name", ["torch", *BACKENDS])
@torch.inference_mode()
def test_rows_of_all_lengths_see_their_own_past(name: str, num_heads: int, mla_context_chunk_size: int) -> None:
    shape = mla_shape(num_heads)
    backend = backend_for(name, shape, mla_context_chunk_size)
    for prefill, decode in ((SHORT, DECODE), (LONG, DECODE), ([], DECODE), (SHORT, []), (LONG, [])):
        assert case(shape, prefill, decode).error(backend) <= TOLERANCE


@pytest.mark.parametrize("name", BACKENDS)
@torch.inference_mode()
def test_steps_that_are_planned_far_ahead_of_the_device_stay_apart(name: str) -> None:
    backend = backend_for(name, mla_shape(16), 256)
    worlds = [case(mla_shape(16), [(0, 256 * size), (300, 64 * size)], DECODE[:size]) for size in range(2, 9)]
    steps = [(each, each.tables.rows) for each in worlds]
    right = []
    for each, rows in steps:
        right.append(each.attended(backend.prepare(rows)))
        torch.cuda.synchronize()
    torch.cuda._sleep(1 << 31)  # a second, in which the host plans all of them
    given = [each.attended(backend.prepare(rows)) for each, rows in steps]
    for one, other in zip(given, right, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


# What a step of drafts asks for: as many tokens of every request, over all that each has cached.
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("name", ["torch", *BACKENDS])
@torch.inference_mode()
def test_several_tokens_of_each_request_see_their_own_past(name: str, num_heads: int, width: int) -> None:
    shape = mla_shape(num_heads)
    drafts = [(start, width) for start, _ in DECODE]
    assert case(shape, drafts, []).error(backend_for(name, shape, 256)) <= TOLERANCE


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("name", ["torch", *(name for name in BACKENDS if name != "triton_mla")])
@torch.inference_mode()
def test_float8_pages_are_read_with_their_scale(name: str, num_heads: int, scale: float) -> None:
    shape = mla_shape(num_heads, cached_dtype=FP8, cached_scale=scale)
    backend = backend_for(name, shape, 256)
    for prefill, decode in ((SHORT, DECODE), (LONG, DECODE), ([], DECODE)):
        assert case(shape, prefill, decode).error(backend) <= TOLERANCE_FP8


@pytest.mark.parametrize("name", BACKENDS)
def test_short_appends_are_absorbed_alone_and_beside_long_prompts(name: str) -> None:
    backend = backend_for(name, mla_shape(16), 256)
    tables = case(mla_shape(16), SHORT, DECODE).tables
    assert backend.prepare(tables.rows).num_prefill_tokens == 0
    step = backend.prepare(case(mla_shape(16), LONG, DECODE).tables.rows)
    assert step.num_prefill_tokens == 300 + 500 + 1 + 700 + 65
    assert step.order_T is not None


@pytest.mark.parametrize("name", BACKENDS)
def test_no_more_tokens_are_absorbed_than_a_schedule_takes(name: str) -> None:
    backend = backend_for(name, mla_shape(16), 256)
    for num_rows, num_long in ((200, 0), (210, 210 * 20)):
        rows = case(mla_shape(16), [(2000, 20)] * num_rows, [(9, 1)]).tables.rows
        assert backend.prepare(rows).num_prefill_tokens == num_long


@pytest.mark.parametrize("name", BACKENDS)
@torch.inference_mode()
def test_latents_whose_elements_lie_beyond_two_to_the_31_are_read(name: str) -> None:
    backend = backend_for(name, mla_shape(16), 256)
    prefill, decode = [(700, 1000), (0, 65)], [(1000, 1), (129, 1)]
    assert case(mla_shape(16), prefill, decode, num_pages=60_000).error(backend) <= TOLERANCE
    assert case(mla_shape(16), [], decode, num_pages=60_000).error(backend) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"latent_dim": 256, "cached_dim": 320}, "kv_lora_rank of 512"), ({"value_dim": 64}, "128 value dims")],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_shape_that_a_kernel_lacks_is_refused_with_its_rule(name: str, changes: dict[str, Any], rule: str) -> None:
    shape = dataclasses.replace(mla_shape(16), **changes)
    assert rule in str(
        try_backend(name, BackendRequirements(shape, PAGE_SIZE, 4096, MAX_TOKENS, GPU), may_compile=True)
    )


def test_a_page_size_that_flashmla_lacks_is_refused_with_its_rule() -> None:
    assert "pages of 64 tokens" in str(
        try_backend("flashmla", BackendRequirements(mla_shape(16), 32, 4096, MAX_TOKENS, GPU))
    )
