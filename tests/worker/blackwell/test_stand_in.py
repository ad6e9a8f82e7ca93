"""The stand-in refuses what flashinfer lets through and the kernels would answer wrongly; it computes what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plait_testing.trtllm_gen import BrokenContract, Launcher
from torch import Tensor

NUM_HEADS = 4
Call = dict[str, Any]


def latent_call() -> Call:
    """Two rows of one query over 40 and 1 tokens in pages of 32, for `trtllm_batch_decode_with_kv_cache_mla`."""
    torch.manual_seed(0)
    return {
        "query": torch.randn(2, 1, NUM_HEADS, 576).bfloat16(),
        "kv_cache": torch.randn(6, 32, 576).bfloat16(),
        "workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.tensor([[3, 1, 5, 5], [2, 5, 5, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 1], dtype=torch.int32),
        "max_seq_len": 128,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "backend": "trtllm-gen",
        "multi_ctas_kv_counter_buffer": torch.zeros(4096, dtype=torch.uint8),
    }


def run(call: Call) -> Tensor:
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

    out: Tensor = trtllm_batch_decode_with_kv_cache_mla(**call)
    return out


def ragged(call: Call, **changes: Any) -> None:
    """The same rows with 2 tokens and 1, and cumulative lengths."""
    call["query"] = torch.randn(3, NUM_HEADS, 576).bfloat16()
    call.update({"cum_seq_lens_q": torch.tensor([0, 2, 3], dtype=torch.int32), "max_q_len": 2} | changes)


BREACHES: dict[str, Callable[[Call], object]] = {
    "a table of int64": lambda call: call.update(block_tables=call["block_tables"].long()),
    "a table with gaps": lambda call: call.update(block_tables=call["block_tables"].repeat(1, 2)[:, ::2]),
    "lengths of int64": lambda call: call.update(seq_lens=call["seq_lens"].long()),
    "lengths with gaps": lambda call: call.update(seq_lens=call["seq_lens"].repeat_interleave(2)[::2]),
    "lengths of more rows": lambda call: call.update(seq_lens=torch.ones(3, dtype=torch.int32)),
    "a row longer than the bound": lambda call: call.update(max_seq_len=39),
    "a row longer than its table": lambda call: call.update(seq_lens=torch.tensor([129, 1], dtype=torch.int32)),
    "a page that is not there": lambda call: call["block_tables"].fill_(6),
    "float8 pages under bfloat16 queries": lambda call: call.update(kv_cache=call["kv_cache"].to(torch.float8_e4m3fn)),
    "a small workspace": lambda call: call.update(workspace_buffer=torch.zeros(64 << 20, dtype=torch.uint8)),
    "a workspace that was not zero": lambda call: call["workspace_buffer"][-1:].fill_(1),
    "counters that are not zero": lambda call: call["multi_ctas_kv_counter_buffer"][:1].fill_(1),
    "too low a bound on the queries": lambda call: ragged(call, max_q_len=1),
    "cumulative lengths of int32 with gaps": lambda call: ragged(
        call, cum_seq_lens_q=torch.tensor([0, 2, 3], dtype=torch.int32).repeat_interleave(2)[::2]
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_what_flashinfer_lets_through_is_refused(launcher: Launcher, breach: str) -> None:
    call = latent_call()
    BREACHES[breach](call)
    with pytest.raises(BrokenContract):
        run(call)


def test_a_log_sum_exp_needs_room_in_the_workspace(launcher: Launcher) -> None:
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    lengths, ends = torch.ones(600, dtype=torch.int32), torch.arange(601, dtype=torch.int32)
    q, v = torch.zeros(600, 128, 192).bfloat16(), torch.zeros(600, 128, 128).bfloat16()
    workspace = torch.zeros(128 << 20, dtype=torch.uint8)
    numbers = (lengths, 1, 1, 0.1, 1.0, -1.0, 600, -1, ends, ends, None, True)
    with pytest.raises(BrokenContract, match="statistics"):
        trtllm_ragged_attention_deepseek(q, q, v, workspace, *numbers, True)


def test_a_number_is_the_softmax_scale_and_a_tensor_too(launcher: Launcher) -> None:
    call = latent_call()
    as_number = run(call)
    as_tensor = run(call | {"bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([1.0])})
    torch.testing.assert_close(as_number, as_tensor)
    seen = call["kv_cache"][[3, 1]].flatten(0, 1)[:40].double()
    weights = (call["query"][0, 0].double() @ seen.T * 0.1).softmax(-1)
    torch.testing.assert_close(as_number[0, 0].double(), weights @ seen[:, :512], atol=0.02, rtol=0)


def test_rows_that_see_nothing_are_left_alone_and_counters_are_left_at_zero(launcher: Launcher) -> None:
    call = latent_call()
    call["seq_lens"][1] = 0
    out = run(call)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not call["multi_ctas_kv_counter_buffer"].any()


def test_the_log_sum_exp_is_of_base_two(launcher: Launcher) -> None:
    call = latent_call() | {"return_lse": True}
    call["query"].zero_()
    lse = run(call)[1]
    torch.testing.assert_close(lse[:, 0], torch.tensor([math.log2(40), 0.0]))
