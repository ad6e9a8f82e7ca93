"""The manifests agree with each other: versions, pins, roots, and what a machine must have."""

import re
import tomllib
from typing import Any

import pytest
from plait_testing import budgets

ROOMS = ("proto", "kernels", "worker")
OURS = ("plait-proto", "plait-kernels", "plait-worker")


def manifest(path: str) -> dict[str, Any]:
    return tomllib.loads((budgets.ROOT / path).read_text())


def version() -> str:
    found: str = manifest("Cargo.toml")["workspace"]["package"]["version"]
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_the_version_of_the_workspace(room: str) -> None:
    assert manifest(f"{room}/pyproject.toml")["project"]["version"] == version()


@pytest.mark.parametrize("path", ["pyproject.toml", *(f"{room}/pyproject.toml" for room in ROOMS)])
def test_the_four_distributions_pin_each_other_exactly(path: str) -> None:
    pinned = [line for line in manifest(path)["project"].get("dependencies", []) if line.startswith("plait")]
    assert all(line.removesuffix(f"=={version()}") in OURS for line in pinned), pinned


def test_the_newest_entry_of_the_changelog_is_of_this_version() -> None:
    changes = (budgets.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == version()


def test_no_toolchain_file_makes_rustup_download_a_compiler() -> None:
    """Cargo and the preflight check `rust-version`; a channel would be fetched even if a newer one is installed."""
    assert not list(budgets.ROOT.glob("rust-toolchain*"))
    assert manifest("Cargo.toml")["workspace"]["package"]["rust-version"]


def test_the_router_needs_the_wire_and_the_worker_needs_wire_and_kernels() -> None:
    needs = {
        room: {line.split("==")[0] for line in manifest(f"{room}/pyproject.toml")["project"]["dependencies"]}
        for room in (".", "worker", "kernels", "proto")
    }
    assert needs["."].intersection(OURS) == {"plait-proto"}
    assert needs["worker"].intersection(OURS) == {"plait-proto", "plait-kernels"}
    assert not needs["kernels"].intersection(OURS)
    assert not needs["proto"].intersection(OURS)
    assert not any(line.startswith("torch") for line in needs["."] | needs["proto"])


@pytest.mark.parametrize("path", ["pyproject.toml", *(f"{room}/pyproject.toml" for room in ROOMS)])
def test_every_dependency_has_a_lower_bound_and_an_upper_one(path: str) -> None:
    project = manifest(path)["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    assert [line for line in wanted if "==" not in line and not (">=" in line and ",<" in line)] == []


def test_every_crate_takes_its_version_and_lints_from_the_workspace() -> None:
    workspace = manifest("Cargo.toml")["workspace"]
    for member in workspace["members"]:
        crate = manifest(f"{member}/Cargo.toml")
        assert crate["lints"] == {"workspace": True}, member
        assert crate["package"]["rust-version"] == {"workspace": True}, member
        assert member == "router/zmq-sys" or crate["package"]["version"] == {"workspace": True}, member


CRATES = {
    "core": set[str](),
    "text": {"plait-core", "plait-proto"},
    "grammar": set[str](),
    "openai": {"plait-core", "plait-grammar", "plait-proto", "plait-text"},
    "engine": {"plait-core", "plait-grammar", "plait-openai", "plait-proto", "plait-text"},
    "sim": {"plait-core", "plait-proto"},
    "fuzz": {"plait-core", "plait-grammar", "plait-openai", "plait-proto", "plait-sim", "plait-text"},
    "python": {"plait-engine", "plait-sim"},
}


@pytest.mark.parametrize("crate", CRATES)
def test_a_crate_of_the_router_depends_on_those_below_it_only(crate: str) -> None:
    needed = {name for name in manifest(f"router/{crate}/Cargo.toml")["dependencies"] if name.startswith("plait-")}
    assert needed == CRATES[crate]


def test_only_pip_builds_the_python_module() -> None:
    workspace = manifest("Cargo.toml")["workspace"]
    assert set(workspace["members"]) - set(workspace["default-members"]) == {"router/python"}


def test_libzmq_is_ours_and_locked() -> None:
    """Without the lock file's entry cargo could take the released crate, which has no CURVE."""
    locked = [package for package in manifest("Cargo.lock")["package"] if package["name"] == "zmq-sys"]
    assert len(locked) == 1
    assert "source" not in locked[0]
