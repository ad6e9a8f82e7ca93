"""`--config FILE` of `plait serve` and `plait launch`."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait import cli
from plait.config_file import MAX_BYTES, apply_config
from plait.flags import read_settings
from plait.settings import ServeSettings
from plait_proto import ExitCode


def read(file: Path, text: str, *words: str) -> tuple[str | None, ServeSettings]:
    """MODEL and settings of `plait serve --config FILE WORDS`."""
    file.write_text(text)
    args = cli.build_arg_parsers()[0].parse_args(["serve", *words, "--config", str(file)])
    apply_config(args, ServeSettings)
    return args.model, read_settings(args, ServeSettings)


TEXT = """
# what the operator wants
model = "folder"
max-seqs = 8
max_num_batched_tokens = 300
served-model-name = [
  "mine",  # max-seqs = 9
  "yours",
]
enforce-eager = true
no-mixed = true
memory-fraction = 0.5
"""


def test_names_aliases_and_several_values_are_read(tmp_path: Path) -> None:
    model, settings = read(tmp_path / "plait.toml", TEXT)
    assert model == "folder"
    assert settings.scheduler.max_seqs == 8
    assert settings.scheduler.max_batch_tokens == 300
    assert settings.http.served_model_name == ("mine", "yours")
    assert not settings.device.cuda_graphs
    assert not settings.scheduler.mixed
    assert settings.pages.memory_fraction == 0.5


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    model, settings = read(tmp_path / "plait.toml", TEXT, "other", "--max-num-seqs", "2", "--mixed")
    assert (model, settings.scheduler.max_seqs, settings.scheduler.mixed) == ("other", 2, True)
    assert settings.scheduler.max_batch_tokens == 300


def test_one_name_needs_no_list(tmp_path: Path) -> None:
    assert read(tmp_path / "c", 'served-model-name = "mine"')[1].http.served_model_name == ("mine",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('served-model-name = [\n "a",\n]\n\n  max-sqs = 3\n', "line 5, column 3: unknown setting 'max-sqs'; did you"),
        ("frobnicate = 3", "line 1, column 1: unknown setting 'frobnicate'; docs/settings.md has all names"),
        ("port = 1\nmax-seqs = 0", "line 2, column 1: --max-seqs is 0; allowed: a whole number from 1 to 4096"),
        ("max-seqs = 1\nmax-num-seqs = 2", "line 2, column 1: max-num-seqs sets what"),
        ("mixed = 1", "line 1, column 1: mixed is 1; allowed: true or false"),
        ("model = 3", "line 1, column 1: model is 3; allowed: a text"),
        ("port = 1\n[scheduler]\nmax-seqs = 3", "line 2, column 1: 'scheduler' is a table; write each setting as"),
        ("log-level = 1979-05-27", "line 1, column 1: --log-level is "),
        ("port = 1\nport =\n", "(at line 2, column 7)"),
        ("port = 1\nport = 2\n", "is not TOML: Cannot overwrite a value"),
        ("a = " + "[" * 5000, "is not TOML"),
        ("#" * (MAX_BYTES + 1), f"more than {MAX_BYTES} bytes"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plait.toml"
    file.write_text(text)
    assert cli.run(["serve", "--config", str(file)]) == ExitCode.SETTINGS
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert str(file) in last


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["launch", "--config", str(tmp_path / "none")]) == ExitCode.SETTINGS
    assert "cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "latin").write_bytes(b"host = '\xe4'")
    assert cli.run(["serve", "--config", str(tmp_path / "latin")]) == ExitCode.SETTINGS
    assert "is not UTF-8" in capsys.readouterr().err
