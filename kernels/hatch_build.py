"""Hatchling's hook: compiles the CPU kernels whenever the package is built or installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOM = Path(__file__).resolve().parent


class NativeBuild(BuildHookInterface[Any]):
    """Puts the libraries into the wheel, which is then for this platform; a wheel without any is for all."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before the wheel is assembled; an editable install finds the libraries beside the sources."""
        command = [sys.executable, str(ROOM / "compile_native.py")]
        targets = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        if not targets:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version != "editable":
            build_data["force_include"] |= {str(ROOM / target): target for target in targets}
