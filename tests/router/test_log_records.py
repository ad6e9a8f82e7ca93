"""Lines of several nodes as JSON objects: what they keep, and what the launcher adds."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from typing import Any

import pytest
from plait.log import RankLines, json_lines, write_json_lines
from plait.nodes.layout import plan_layout
from plait.nodes.loaded_ranks import LoadedRanks
from plait.nodes.log_lines import Source, encode_line, read_line

HEAD = {"time": "2026-01-31T12:00:00.250+00:00", "level": "WARNING", "source": "engine", "message": "late"}


@pytest.fixture
def _json_lines() -> Iterator[None]:
    write_json_lines(True)
    yield
    write_json_lines(False)


def passed_on(record: dict[str, Any], node: int, first_rank: int) -> dict[str, Any]:
    """What the launcher writes for an engine's line."""
    [line] = encode_line(read_line(json.dumps(record), node, first_rank))
    passed: dict[str, Any] = json.loads(line)
    return passed


@pytest.mark.usefixtures("_json_lines")
def test_a_line_keeps_its_fields_and_has_its_node() -> None:
    record = HEAD | {"replica": 1, "request_id": "told-1"}
    assert passed_on(record, 3, 12) == record | {"node": 3}


@pytest.mark.usefixtures("_json_lines")
def test_ranks_are_counted_through_all_nodes() -> None:
    assert passed_on(HEAD | {"source": "rank 1"}, 3, 12) == HEAD | {"source": "rank 13", "node": 3, "rank": 13}
    assert passed_on(HEAD | {"rank": 1}, 3, 12) == HEAD | {"node": 3, "rank": 13}, "the engine says it of a rank"


@pytest.mark.usefixtures("_json_lines")
@pytest.mark.parametrize("text", ["Loading /model", "{not json", "{}", '{"time": 1, "level": 2}', '["a"]'])
def test_a_line_that_is_no_object_of_ours_becomes_one(text: str) -> None:
    said = read_line(text, 1, 4)
    assert said.source == Source(1, None)
    [line] = map(json.loads, encode_line(said))
    assert (line["level"], line["source"], line["message"], line["node"]) == ("INFO", "plait", text, 1)


@pytest.mark.usefixtures("_json_lines")
def test_a_line_that_would_be_too_long_with_its_place_becomes_several() -> None:
    message = "x" * (select.PIPE_BUF - len(next(json_lines(HEAD | {"message": ""}))))
    [whole] = json_lines(HEAD | {"message": message})
    lines = list(encode_line(read_line(whole.decode(), 1, 0)))
    assert len(lines) > 1
    assert all(len(line) <= select.PIPE_BUF for line in lines)
    assert "".join(json.loads(line)["message"] for line in lines) == message


@pytest.mark.usefixtures("_json_lines")
def test_the_load_ends_with_lines_of_text_or_of_objects_alike() -> None:
    layout = plan_layout(num_nodes=2, tp=2, dp=1, dp_attention=False, gpus_per_node=0)
    loaded = LoadedRanks(layout)
    for node in (0, 1):
        assert node in loaded.missing()
        made: list[bytes] = []
        RankLines(node, made.append).add_line(f"2026-01-31 12:00:00,250 INFO rank {node}: weights: 1.2 s")
        for line in made:
            loaded.note(read_line(line.decode(), node, layout.first_rank_of_engine(node)))
    assert loaded.missing() == []


def test_without_the_flag_an_object_is_a_text_like_any_other() -> None:
    text = json.dumps(HEAD)
    assert read_line(text, 0, 0).text == text
