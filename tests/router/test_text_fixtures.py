"""The fixtures of `plait-text`'s Rust tests say what transformers and jinja2 say today."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import text_fixtures
from plait_testing.recording import Record
from plait_testing.reference import load_tokenizer
from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_gguf)


def test_the_committed_renders_are_what_jinja2_writes() -> None:
    assert json.loads(text_fixtures.RENDERS.read_text("utf-8")) == list(text_fixtures.renders())


def test_the_committed_ids_are_what_transformers_gives(tokenizer: PreTrainedTokenizerBase) -> None:
    assert json.loads(text_fixtures.TOKENS.read_text("utf-8")) == text_fixtures.token_cases(tokenizer)


@pytest.mark.acceptance("spine")
def test_random_texts_have_transformers_ids(
    demo_gguf: Path, tokenizer: PreTrainedTokenizerBase, sized: Callable[[int, int], int], record: Record
) -> None:
    texts = text_fixtures.texts(sized(500, 10_000), 1, _prose())
    ours = _ids_from_rust(demo_gguf, texts)
    theirs = [tokenizer(text)["input_ids"] for text in texts]
    different = [text for text, our, their in zip(texts, ours, theirs, strict=True) if our != their]
    case = "SmolLM2 token ids against transformers"
    record(case, "texts", "texts", len(texts))
    record(case, "texts_different", "texts", len(different), 0)
    assert different == []


def _prose() -> str:
    """Prose from the shared data where it is there."""
    files = [DATA / "shakespeare_first1MB.txt", DATA / "gsm8k_test.jsonl"]
    return "".join(file.read_text("utf-8") for file in files if file.exists()) or text_fixtures.PROSE


def _ids_from_rust(gguf: Path, texts: list[str]) -> list[list[int]]:
    """The engine's ids, from its example program."""
    # Without a package's name the workspace's features hold, and what `cargo test` built is taken as it is.
    command = [sys.executable, "tools/cargo.py", "run", "--quiet", "--example", "tokenise"]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    done = subprocess.run(
        [*command, "--", str(gguf)], cwd=ROOT, input=lines, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
