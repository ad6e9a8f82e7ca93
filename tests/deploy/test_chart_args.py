"""Flags of `args`: those that the chart writes, or that cannot work in a pod, are refused with what to do."""

from __future__ import annotations

import re

import pytest
from plait.cli import build_arg_parsers
from plait_testing.chart import CHART, GOOD, container, needs_helm, refusal, rendered

pytestmark = needs_helm


def flags_with_aliases(names: set[str]) -> list[str]:
    """Each name that the command line has for these flags."""
    _, commands = build_arg_parsers()
    actions = [action.option_strings for name in ("serve", "launch") for action in commands[name]._actions]
    return sorted({name for strings in actions if names & set(strings) for name in strings})


def flags_of_the_chart() -> set[str]:
    """Those that the template of the command line writes."""
    text = (CHART / "templates" / "_pod.tpl").read_text()
    (args,) = re.findall(r'define "plait.args" -}}(.*?){{- range .Values.args }}', text, re.DOTALL)
    return set(re.findall(r'^- (?:{{ printf ")?(--[a-z-]+)', args, re.MULTILINE))


def test_the_chart_writes_flags() -> None:
    assert {"--host", "--port", "--tp", "--restart", "--metrics-without-key", "--launcher"} <= flags_of_the_chart()


@pytest.mark.parametrize("flag", flags_with_aliases(flags_of_the_chart() | {"--nnodes"}))
def test_a_flag_of_the_chart_is_refused_by_each_of_its_names(flag: str) -> None:
    said = refusal(GOOD | {"args": [f"{flag}=1"]})
    assert f"args has {flag}" in said
    assert re.search(r"set \w+(\.\w+)? instead|leave it out: \w+", said)


@pytest.mark.parametrize(
    "flag",
    [
        "--uds",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--ssl-ca-certs",
        "--config",
        "--node-rank",
        "--group-endpoint",
        "--rank-hosts",
    ],
)
def test_a_flag_that_no_pod_can_take_is_refused_with_the_reason(flag: str) -> None:
    assert flags_with_aliases({flag}), "the command line has it"
    assert f"args has {flag}; leave it out: " in refusal(GOOD | {"args": [flag, "x"]})


@pytest.mark.parametrize("words", [["--max-seqs=8"], ["--no-ui"], ["--restart-file", "/cache/restarts"], ["x"]])
def test_other_words_are_taken(words: list[str]) -> None:
    assert container(rendered(GOOD | {"args": words}))["args"][-len(words) :] == words


def test_numbers_become_words() -> None:
    one = container(rendered(GOOD | {"args": ["--max-batch-tokens", 16_777_216, "--memory-fraction", 0.85]}))
    assert one["args"][-4:] == ["--max-batch-tokens", "16777216", "--memory-fraction", "0.85"]
