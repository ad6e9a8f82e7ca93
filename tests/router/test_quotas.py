"""What a key may have under way, and begin in a minute, on a clock of the test's."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from plait.http.identity import KEY
from plait.http.key_terms import TERMS, KeyTerms, parse_line
from plait.http.quotas import OverQuotaError, Quotas
from plait.http.streams import Used
from starlette.types import Scope


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def holder(key: str, terms: KeyTerms) -> Scope:
    return {KEY: key.encode(), TERMS: terms}


def retry_after(error: OverQuotaError) -> int:
    return int(dict(error.headers)[b"retry-after"])


def test_any_minute_has_as_many_requests_as_are_allowed_and_no_more(quotas: Quotas, clock: Clock) -> None:
    scope = holder("a", KeyTerms(requests_per_minute=7))
    begun: list[float] = []
    refused: list[tuple[float, OverQuotaError]] = []
    for _ in range(3000):
        try:
            with quotas.request(scope):
                begun.append(clock.now)
        except OverQuotaError as error:
            refused.append((begun[-7] + 60 - clock.now, error))
        clock.now += 0.25
    assert all(later - earlier >= 60 for earlier, later in zip(begun, begun[7:], strict=False))
    assert len(begun) == 7 * 13, "750 s begin 13 windows"
    assert all(wait <= retry_after(error) < wait + 1 for wait, error in refused)
    assert "requests_per_minute=7 is its bound" in refused[0][1].message


def test_as_many_requests_are_under_way_as_are_allowed(quotas: Quotas) -> None:
    scope = holder("a", KeyTerms(max_running=2))
    said = "has 2 requests under way, where max_running=2 is its bound"
    for _ in range(3):
        with quotas.request(scope):
            with quotas.request(scope), pytest.raises(OverQuotaError, match=said), quotas.request(scope):
                pass
            with quotas.request(scope):
                pass


def test_retry_after_follows_from_how_long_requests_take(quotas: Quotas, clock: Clock) -> None:
    scope = holder("a", KeyTerms(max_running=4))
    for _ in range(3):
        with quotas.request(scope):
            clock.now += 40
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(quotas.request(scope))
        with pytest.raises(OverQuotaError) as error, quotas.request(scope):
            pass
    assert retry_after(error.value) == 10


def test_a_minute_with_too_many_tokens_lets_none_begin(quotas: Quotas, clock: Clock) -> None:
    scope = holder("a", KeyTerms(tokens_per_minute=100))
    for num in (60, 30, 15):
        with quotas.request(scope) as on_used:
            assert on_used is not None
            on_used(Used(1, num - 1, "stop"))
        clock.now += 10
    said = "took 105 tokens, where tokens_per_minute=100 is its bound"
    with pytest.raises(OverQuotaError, match=said) as error, quotas.request(scope):
        pass
    assert retry_after(error.value) == 30, "the first 60 leave the minute then"
    clock.now += 29.5
    with pytest.raises(OverQuotaError), quotas.request(scope):
        pass
    clock.now += 0.5
    with quotas.request(scope):
        pass


def test_tokens_of_many_short_requests_are_all_counted(quotas: Quotas, clock: Clock) -> None:
    scope = holder("a", KeyTerms(tokens_per_minute=1000))
    for _ in range(999):
        with quotas.request(scope) as on_used:
            assert on_used is not None
            on_used(Used(1, 0, "length"))
        clock.now += 0.01
    with quotas.request(scope) as on_used:
        assert on_used is not None
        on_used(Used(1, 0, "length"))
    with pytest.raises(OverQuotaError), quotas.request(scope):
        pass


def test_a_request_that_fails_is_under_way_no_longer(quotas: Quotas) -> None:
    scope = holder("a", KeyTerms(max_running=1))
    for _ in range(2):
        with pytest.raises(RuntimeError), quotas.request(scope):
            raise RuntimeError


def test_keys_do_not_count_against_each_other(quotas: Quotas) -> None:
    terms = KeyTerms(max_running=1, requests_per_minute=1)
    with quotas.request(holder("a", terms)), quotas.request(holder("b", terms)), quotas.request({}):
        pass


def test_a_new_bound_counts_what_was_before(quotas: Quotas) -> None:
    with quotas.request(holder("a", KeyTerms(requests_per_minute=5))):
        pass
    with pytest.raises(OverQuotaError), quotas.request(holder("a", KeyTerms(requests_per_minute=1))):
        pass
    with quotas.request(holder("a", KeyTerms(requests_per_minute=2))):
        pass


def test_a_line_gives_name_and_bounds() -> None:
    line = "sk-1 name=search.team-2 max_running=8 requests_per_minute=600 weight=2"
    terms = KeyTerms(name="search.team-2", max_running=8, requests_per_minute=600, weight=2)
    assert parse_line(line) == ("sk-1", terms)
    assert parse_line("sk-1 name=12") == ("sk-1", KeyTerms(name="12"))


@pytest.mark.parametrize(
    "term",
    [
        "max_running=0",
        "requests_per_minute=0",
        "requests_per_minute=100001",
        "tokens_per_minute=0",
        "max_running=-1",
        "max_running=1.5",
        "name=",
        "name=a/b",
        "name=" + "x" * 65,
        "requests_a_minute=5",
    ],
)
def test_a_bound_of_zero_or_a_term_that_is_none_is_refused(term: str) -> None:
    with pytest.raises(ValueError, match="requests_per_minute"):
        parse_line(f"sk-1 {term}")
