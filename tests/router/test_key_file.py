"""A key file that changes while the server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.http.key_file import KeyFile, with_key_metrics
from plait.http.key_terms import KeyTerms


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", "old\n")


def write(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def replaced(path: Path, content: str) -> None:
    """As `kubectl` and careful editors do: a new file takes the name."""
    write(path.with_suffix(".new"), content).rename(path)


def poll_until_settled(keys: KeyFile) -> None:
    keys.poll()
    keys.poll()


def admitted(keys: KeyFile) -> list[str]:
    return [key for key in ("old", "new") if keys.admit(key.encode()) is not None]


def sample(keys: KeyFile, name: str) -> str:
    return next(line for line in keys.metrics().decode().splitlines() if line.startswith(name + " ")).split()[-1]


@pytest.mark.parametrize("change", [write, replaced])
def test_keys_come_and_go_with_the_file(path: Path, change: object, capfd: pytest.CaptureFixture[str]) -> None:
    keys = KeyFile(path, "fair")
    assert callable(change)
    change(path, "old\nnew weight=3\n")
    poll_until_settled(keys)
    assert keys.admit(b"new") == KeyTerms(weight=3)
    change(path, "new\n")
    poll_until_settled(keys)
    assert admitted(keys) == ["new"]
    assert keys.admit(b"new") == KeyTerms()
    assert sample(keys, 'plait_api_key_file_changes_total{result="loaded"}') == "2"
    assert (
        capfd.readouterr().err
        == f"API keys: 2 from {path}, which has changed\nAPI keys: 1 from {path}, which has changed\n"
    )


def test_a_file_that_is_being_written_is_not_read(path: Path) -> None:
    keys = KeyFile(path, "fcfs")
    write(path, "ne")
    keys.poll()
    write(path, "new\n")
    keys.poll()
    assert admitted(keys) == ["old"]
    keys.poll()
    assert admitted(keys) == ["new"]


def test_an_unchanged_file_is_read_once(path: Path) -> None:
    keys = KeyFile(path, "fcfs")
    poll_until_settled(keys)
    assert sample(keys, 'plait_api_key_file_changes_total{result="loaded"}') == "0"


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("", 0o600, "holds no key"),
        ("new\n", 0o644, "readable by other users"),
        ("new weight=9\n", 0o600, "--policy fcfs does not read"),
        ("new weight=none\n", 0o600, "has a line with"),
        ("näu\n", 0o600, "not ASCII"),
        ("new # for the team\n", 0o600, "lines of their own"),
    ],
)
def test_a_broken_new_file_keeps_the_old_keys_and_says_why(
    path: Path, content: str, mode: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = KeyFile(path, "fcfs")
    write(path, content, mode)
    poll_until_settled(keys)
    assert admitted(keys) == ["old"]
    assert sample(keys, "plait_api_key_file_refused") == "1"
    line = capfd.readouterr().err
    assert line.startswith("API keys: kept the 1 that were read before, for --api-key-file ")
    assert problem in line
    poll_until_settled(keys)
    assert capfd.readouterr().err == ""
    write(path, "new\n")
    poll_until_settled(keys)
    assert admitted(keys) == ["new"]
    assert sample(keys, "plait_api_key_file_refused") == "0"


def test_a_file_that_is_gone_keeps_its_keys(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = KeyFile(path, "fcfs")
    path.unlink()
    poll_until_settled(keys)
    assert admitted(keys) == ["old"]
    assert "cannot be read: No such file" in capfd.readouterr().err
    write(path, "new\n")
    poll_until_settled(keys)
    assert admitted(keys) == ["new"]


def test_comments_and_empty_lines_are_no_keys(path: Path) -> None:
    write(path, "# of the team\n\n  # and another\n#old\nnew\nwith#inside\n")
    keys = KeyFile(path, "fcfs")
    assert sample(keys, "plait_api_keys") == "2"
    assert [key for key in (b"#old", b"# of the team", b"new", b"with#inside") if keys.admit(key)] == [
        b"new",
        b"with#inside",
    ]


def test_the_metrics_page_stays_one_page(path: Path) -> None:
    page = with_key_metrics(b"plait_steps_total 1\n# EOF\n", KeyFile(path, "fcfs")).decode()
    assert page.count("# EOF") == 1
    assert page.endswith("\n# EOF\n")
    assert "plait_api_keys 1\n" in page
