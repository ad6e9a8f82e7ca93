"""No tracked file holds a retired word, and the list of them says what to write instead."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from types import ModuleType
from typing import Any

import pytest
from plait_testing import budgets

SCRIPT = budgets.ROOT / "tests" / "contract" / "retired_words.py"
LIST: dict[str, Any] = tomllib.loads(SCRIPT.with_suffix(".toml").read_text(encoding="utf-8"))


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("retired_words", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["retired_words"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


retired_words = load()


def test_no_tracked_file_has_a_retired_word() -> None:
    assert list(map(str, retired_words.all_hits())) == []


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("worker/a.py", "x\nplace_T = 1\n", ['worker/a.py:2: retired "place_T": use "slot_mapping"']),
        ("kernels/a.py", "the product", ['kernels/a.py:1: retired "product": use "GEMM or matmul"']),
        ("kernels/a.py", "the dot product; itertools.product", []),
        ("router/a.rs", "the product", []),
        ("kernels/plait_kernels/dependent.py", "", ["kernels/plait_kernels/dependent.py:0: retired"]),
        ("docs/glossary.md", "roster", []),
    ],
)
def test_a_hit_names_file_line_and_the_word_to_use(path: str, text: str, said: list[str]) -> None:
    hits = list(map(str, retired_words.read_list().hits(path, text)))
    assert len(hits) == len(said)
    assert all(hit.startswith(start) for hit, start in zip(hits, said, strict=True)), hits


def test_every_exception_has_its_reason_and_every_folder_is_there() -> None:
    assert all(entry["why"] for entry in LIST["left_out"])
    exceptions = [(path, why) for word in LIST["word"] for path, why in word.get("kept_in", {}).items()]
    assert all(why for _, why in exceptions)
    folders = {path for word in LIST["word"] for path in word.get("within", ())}
    assert [path for path in (*folders, *(path for path, _ in exceptions)) if not (budgets.ROOT / path).exists()] == []


def test_an_entry_without_a_pattern_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="neither `text` nor `path`; give one"):
        retired_words.parse({"use": "GEMM"})
