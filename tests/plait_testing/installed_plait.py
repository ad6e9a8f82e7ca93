"""Plait in /opt of a mount namespace, where any user reads it: this Python, its packages and the repository."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from plait_testing import budgets

MOUNT = """
mount -t tmpfs -o mode=755 tmpfs "${at:-}/opt"
for name in plait/bin python packages source; do mkdir -p "${at:-}/opt/$name"; done
mount --bind "$python" "${at:-}/opt/python"
mount --bind "$packages" "${at:-}/opt/packages"
mount --bind "$root" "${at:-}/opt/source"
install -m 0755 "$program" "${at:-}/opt/plait/bin/plait"
"""
"""A shell does this in the namespace, as root; `at` is another root than its own."""
_PYTHON = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
_PROGRAM = f"""#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib
export PYTHONPATH=/opt/source/router/python:/opt/source/worker:/opt/source/kernels:/opt/source/proto:/opt/packages
exec {_PYTHON} -m plait.cli "$@"
"""


def variables(folder: Path) -> dict[str, str]:
    """Of `MOUNT`; writes the program into `folder`."""
    program = folder / "plait"
    program.write_text(_PROGRAM)
    found = {"python": sys.base_prefix, "packages": sysconfig.get_path("purelib"), "root": str(budgets.ROOT)}
    return found | {"program": str(program)}


def inside(path: Path) -> Path:
    """A file of the repository, as the namespace has it."""
    return Path("/opt/source") / path.relative_to(budgets.ROOT)
