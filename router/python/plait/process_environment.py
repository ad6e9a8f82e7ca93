"""Environment variables that an engine's processes need."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from plait.kernels import compiler_folders

# How long a CPU worker's threads spin before they sleep. libgomp's default is 30 times longer. It is no faster
# alone, and beside one busy process a prefill takes five times as long: threads on a core wait for one without.
_OPENMP_SPINS = "10000"


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Add what is not given."""
    environment.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)
    for variable, folders in compiler_folders().items():
        _append_folders(environment, variable, folders)


def _append_folders(environment: MutableMapping[str, str], variable: str, folders: list[Path]) -> None:
    known = [folder for folder in environment.get(variable, "").split(os.pathsep) if folder]
    if more := [str(folder) for folder in folders if str(folder) not in known]:
        environment[variable] = os.pathsep.join(known + more)
