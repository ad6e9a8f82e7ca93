"""What the GPU's benchmark makes of what it measured: rooflines, scaled goals, rescored streams."""

import pytest
from bench.gpu.load_cases import LOADED, RATE, Goal
from bench.gpu.model_shapes import SHAPES
from bench.gpu.rescoring import Gaps, Scored, token_gaps
from bench.gpu.roofline import NOMINAL, Ceilings, model_cost, most_tokens_per_second

# Worked out by hand for the same machine when the goals were set.
FLOORS = [
    ("qwen3-8b", 1, 128, 128, 277),
    ("qwen3-8b", 64, 128, 128, 12_400),
    ("qwen3-8b", 256, 128, 128, 22_400),
    ("qwen3-8b", 256, 1024, 128, 4_850),
    ("qwen3-8b", 32, 8192, 256, 924),
    ("deepseek-v2-lite", 1, 128, 128, 840),
    ("deepseek-v2-lite", 256, 128, 128, 27_900),
    ("deepseek-v2-lite", 256, 1024, 128, 12_000),
]


@pytest.mark.parametrize(("shape", "streams", "prompt", "answer", "tokens_per_second"), FLOORS)
def test_the_roofline_follows_from_a_models_shape(
    shape: str, streams: int, prompt: int, answer: int, tokens_per_second: float
) -> None:
    found = most_tokens_per_second(model_cost(SHAPES[shape]), streams, prompt, answer, NOMINAL)
    assert found == pytest.approx(tokens_per_second, rel=0.03)


def test_half_the_gemm_rate_lowers_the_roofline_of_compute_bound_loads() -> None:
    cost, slow = model_cost(SHAPES["qwen3-8b"]), Ceilings(NOMINAL.gemm / 2, NOMINAL.copy)
    of_one, of_many = (
        most_tokens_per_second(cost, streams, 128, 128, slow) / most_tokens_per_second(cost, streams, 128, 128, NOMINAL)
        for streams in (1, 256)
    )
    assert of_one > 0.98
    assert 0.5 < of_many < 0.7


def test_rates_shrink_and_times_grow_with_a_slower_machine() -> None:
    rate, time = Goal(RATE, 100.0), Goal("itl_max", 0.3)
    assert rate.is_met(100.0)
    assert not rate.is_met(80.0)
    assert rate.is_met(80.0, share=0.8)
    assert time.is_met(0.3)
    assert not time.is_met(0.37)
    assert time.is_met(0.37, share=0.8)


def test_loads_of_one_server_follow_one_another() -> None:
    for loaded in LOADED.values():
        flags = [case.serve_flags for case in loaded.chosen(lambda _case: True)]
        assert len(flags) == len(loaded.cases)
        assert flags == sorted(flags, key=loaded.servers.index)


def test_a_tokens_gap_is_what_it_lies_below_the_best() -> None:
    scores: list[dict[str, Scored] | None] = [
        None,
        {"5": {"logprob": -9.0}, "1": {"logprob": -0.1}},
        {"7": {"logprob": -0.5}},
        {"8": {"logprob": -1.25}, "9": {"logprob": -1.0}},
    ]
    assert token_gaps(scores, [7, 8]) == [0.0, 0.25]


@pytest.mark.parametrize(
    ("gaps", "is_right"), [([0.0, 0.0, 0.5], True), ([0.0, 0.0, 0.51], False), ([0.0, 0.06, 0.07], False), ([], False)]
)
def test_a_run_counts_where_its_tokens_are_nearly_the_best(gaps: list[float], is_right: bool) -> None:
    assert Gaps(1, gaps).is_right == is_right
