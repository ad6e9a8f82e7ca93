"""Sampling agrees with a float64 computation of the filters, whatever rows share the call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plait_kernels.sampling import (
    NO_TOKEN,
    Filters,
    sample_filtered,
    sample_greedy,
    sample_random,
    score_tokens,
    uniform,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Request:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def oracle(logits: Floats, request: Request) -> Floats:
    """Probabilities over the vocabulary after every filter."""
    scaled = (logits - logits.max()) / np.float64(np.float32(request.temperature))
    weights: Floats = np.exp(scaled)
    order = np.argsort(-logits, kind="stable")
    if request.top_k:
        weights[order[request.top_k :]] = 0
    if request.top_p < 1:
        ordered = weights[order]
        before = np.cumsum(ordered) - ordered
        dropped = before >= np.float64(np.float32(request.top_p)) * ordered.sum()
        weights[order[1:][dropped[1:]]] = 0
    weights[weights < np.float32(request.min_p)] = 0
    probabilities: Floats = weights / weights.sum()
    return probabilities


def sample(logits_SV: torch.Tensor, requests: list[Request], uniform_S: torch.Tensor) -> torch.Tensor:
    temperature_S = torch.tensor([request.temperature for request in requests])
    return sample_filtered(logits_SV, temperature_S, filters(requests), uniform_S)


def filters(requests: list[Request]) -> Filters:
    return Filters(
        top_k_S=torch.tensor([request.top_k for request in requests]),
        top_p_S=torch.tensor([request.top_p for request in requests]),
        min_p_S=torch.tensor([request.min_p for request in requests]),
    )


def some_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


REQUESTS = [
    Request(),
    Request(temperature=0.3),
    Request(top_k=1),
    Request(top_k=5),
    Request(top_k=10_000),
    Request(top_p=0.5),
    Request(top_p=0.999),
    Request(top_p=1e-6),
    Request(min_p=0.2),
    Request(temperature=1.7, top_k=20, top_p=0.8),
    Request(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05),
    Request(temperature=2.0, top_p=0.95, min_p=0.01),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@pytest.mark.parametrize("vocab", [7, 256, 3000])
def test_each_filter_keeps_what_float64_keeps(request_: Request, vocab: int) -> None:
    logits_V = some_logits(vocab, 1, vocab)[0]
    expected_V = oracle(logits_V.double().numpy(), request_)
    draws_S = torch.linspace(0, 1 - 1e-9, 1001, dtype=torch.float64)
    sampled_S = sample(logits_V.expand(1001, vocab).contiguous(), [request_] * 1001, draws_S)
    shares_V = np.bincount(sampled_S.numpy(), minlength=vocab) / 1001
    assert np.abs(shares_V - expected_V).max() < 2 / 1001
    assert (expected_V[sampled_S.numpy()] > 0).all()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 600), st.floats(0, 1, exclude_max=True), st.data())
def test_a_sample_is_the_inverse_of_the_cumulative_distribution(
    seed: int, vocab: int, draw: float, data: st.DataObject
) -> None:
    request = data.draw(
        st.builds(
            Request,
            temperature=st.floats(0.0625, 5, width=32),
            top_k=st.integers(0, 700),
            top_p=st.floats(0, 1, width=32),
            min_p=st.floats(0, 1, width=32),
        )
    )
    logits_V = some_logits(seed, 1, vocab)[0]
    sampled = int(sample(logits_V[None], [request], torch.tensor([draw], dtype=torch.float64)))
    probabilities = oracle(logits_V.double().numpy(), request)
    order = np.argsort(-logits_V.numpy(), kind="stable")
    rank = int(np.flatnonzero(order == sampled)[0])
    cumulative = np.cumsum(probabilities[order])
    assert cumulative[rank] - probabilities[sampled] <= draw + 1e-5
    assert draw <= cumulative[rank] + 1e-5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 600), st.floats(0, 1, exclude_max=True), st.floats(0, 1, width=32))
def test_without_a_sort_the_distribution_runs_in_vocabulary_order(
    seed: int, vocab: int, draw: float, min_p: float
) -> None:
    logits_V = some_logits(seed, 1, vocab)[0]
    draw_1 = torch.tensor([draw], dtype=torch.float64)
    sampled = int(sample_random(logits_V[None], torch.tensor([0.8]), torch.tensor([min_p]), draw_1))
    probabilities = oracle(logits_V.double().numpy(), Request(temperature=0.8, min_p=min_p))
    cumulative = np.cumsum(probabilities)
    assert cumulative[sampled] - probabilities[sampled] <= draw + 1e-5
    assert draw <= cumulative[sampled] + 1e-5


def test_a_row_samples_the_same_token_in_any_batch() -> None:
    vocab = 5000
    requests = [REQUESTS[i % len(REQUESTS)] for i in range(60)]
    logits_SV = some_logits(3, 60, vocab)
    uniform_S = uniform(torch.arange(60) * 1_000_003, torch.arange(60))
    together = sample(logits_SV, requests, uniform_S)
    alone = [int(sample(logits_SV[i : i + 1], requests[i : i + 1], uniform_S[i : i + 1])) for i in range(60)]
    assert together.tolist() == alone


def test_a_flat_nucleus_wider_than_the_candidates_is_still_whole() -> None:
    vocab = 6000
    logits_SV = torch.zeros(2001, vocab)
    draws_S = torch.linspace(0, 0.9999, 2001, dtype=torch.float64)
    sampled_S = sample(logits_SV, [Request(top_p=0.5)] * 2001, draws_S)
    assert sampled_S.max() == int(0.9999 * 3000)
    assert torch.equal(sampled_S, (draws_S * 3000).long())


def test_the_frequencies_follow_the_probabilities() -> None:
    vocab, num_draws = 40, 40_000
    request = Request(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01)
    logits_V = some_logits(11, 1, vocab, spread=1.0)[0]
    expected_V = oracle(logits_V.double().numpy(), request)
    uniform_S = uniform(torch.full((num_draws,), 2**40 + 5), torch.arange(num_draws))
    sampled_S = sample(logits_V.expand(num_draws, vocab).contiguous(), [request] * num_draws, uniform_S)
    counts_V = np.bincount(sampled_S.numpy(), minlength=vocab)
    kept = expected_V > 0
    assert counts_V[~kept].sum() == 0
    chi_square = float(((counts_V - num_draws * expected_V)[kept] ** 2 / (num_draws * expected_V[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert freedom > 10
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_sample_kept_tokens(edge: float) -> None:
    logits_SV = some_logits(5, len(REQUESTS), 3001)
    logits_SV[:, -1] = -torch.inf
    logits_SV[:, 0] = -torch.inf
    sampled_S = sample(logits_SV, REQUESTS, torch.full((len(REQUESTS),), edge, dtype=torch.float64))
    for row, request in enumerate(REQUESTS):
        assert oracle(logits_SV[row].double().numpy(), request)[sampled_S[row]] > 0


def test_ties_go_to_the_lower_id() -> None:
    logits_SV = torch.tensor([[0.0, 2.0, -0.0, 2.0, 2.0, 0.0]])
    assert sample_greedy(logits_SV).item() == 1
    draws = torch.tensor([0.01, 0.49, 0.51, 0.99], dtype=torch.float64)
    sampled = sample(logits_SV.expand(4, 6).contiguous(), [Request(top_k=2)] * 4, draws)
    assert sampled.tolist() == [1, 1, 3, 3]
    scores = score_tokens(logits_SV, torch.tensor([4]), 6)
    assert scores.rank_S.item() == 3
    assert scores.best_ids_SK.tolist() == [[1, 3, 4, 0, 2, 5]]


def test_scores_are_those_of_the_distribution_before_temperature() -> None:
    logits_SV = some_logits(8, 4, 1000)
    ids_S = torch.tensor([0, 17, 999, 500])
    scores = score_tokens(logits_SV, ids_S, 3)
    exact_SV = torch.log_softmax(logits_SV.double(), dim=-1)
    assert torch.allclose(scores.logprob_S.double(), exact_SV.gather(1, ids_S[:, None])[:, 0], atol=1e-5)
    assert scores.rank_S.tolist() == [(row > row[i]).sum() + 1 for row, i in zip(logits_SV, ids_S, strict=True)]
    assert torch.equal(scores.best_ids_SK, logits_SV.topk(3).indices)
    assert torch.allclose(scores.best_logprobs_SK.double(), exact_SV.topk(3).values, atol=1e-5)


def test_no_best_tokens_are_given_if_none_are_requested() -> None:
    scores = score_tokens(some_logits(1, 2, 10), torch.tensor([1, 2]), 0)
    assert scores.best_ids_SK.shape == (2, 0)
    assert scores.best_logprobs_SK.shape == (2, 0)


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 5000])
def test_the_greedy_token_is_the_first_of_the_largest(vocab: int) -> None:
    logits_SV = some_logits(vocab, 50, vocab).round()
    logits_SV[7, 1:] = -torch.inf
    assert sample_greedy(logits_SV).tolist() == logits_SV.numpy().argmax(axis=1).tolist()


def test_a_row_without_a_finite_logit_has_no_token() -> None:
    logits_SV = some_logits(1, 3, 300)
    logits_SV[1] = -torch.inf
    first, none, last = sample_greedy(logits_SV).tolist()
    assert none == NO_TOKEN
    assert [first, last] == logits_SV[::2].argmax(dim=1).tolist()
