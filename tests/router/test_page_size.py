"""Tokens of a page follow from the model's family, unless the user gives them."""

from pathlib import Path

import pytest
from plait.page_size import with_page_size
from plait.settings import PageSettings, ServeSettings


def page_size(tmp_path: Path, config: str, given: int | None = None) -> int | None:
    (tmp_path / "config.json").write_text(config)
    return with_page_size(ServeSettings(pages=PageSettings(page_size=given)), tmp_path).pages.page_size


@pytest.mark.parametrize(("architecture", "expected"), [("DeepseekV4ForCausalLM", 256), ("LlamaForCausalLM", 64)])
def test_a_family_has_its_own_number(architecture: str, expected: int, tmp_path: Path) -> None:
    assert page_size(tmp_path, f'{{"architectures": ["{architecture}"]}}') == expected


def test_what_the_user_gives_stays(tmp_path: Path) -> None:
    assert page_size(tmp_path, '{"architectures": ["DeepseekV4ForCausalLM"]}', given=128) == 128


@pytest.mark.parametrize("config", ["{}", "no JSON", '{"architectures": 3}', '{"architectures": ["Gpt"]}'])
def test_a_configuration_that_says_nothing_gives_the_usual_number(config: str, tmp_path: Path) -> None:
    """The engine says what is wrong with it."""
    assert page_size(tmp_path, config) == 64


def test_a_gguf_file_gives_the_usual_number(tmp_path: Path) -> None:
    assert with_page_size(ServeSettings(), tmp_path / "model.gguf").pages.page_size == 64
