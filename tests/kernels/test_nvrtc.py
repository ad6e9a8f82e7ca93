"""Where CUDA C++ cannot be compiled, other kernels compute, and the log says once what to install."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import plait_kernels
import pytest
import torch

pytestmark = pytest.mark.process
CHOOSE = """
import logging, torch
logging.basicConfig(format="%(message)s")
from plait_kernels import nvrtc, sampling
from plait_kernels.backends import TABLE, Call
from plait_kernels.collective import unsupported_reason
call = Call(torch.device("cuda"), torch.bfloat16, 1)
print(*(op.backend(call).module for op in TABLE["plait_kernels.sampling"].values()))
print(unsupported_reason(2, 4096, torch.bfloat16))
"""
OTHERS = "triton checked_reference checked_reference adjust mask philox"
"""The backends of a GPU's tensors, op by op, if nothing can be compiled."""
BINDINGS = importlib.util.find_spec("cuda")


def choose(*folders: Path) -> tuple[list[str], list[str]]:
    """What is printed and what is logged where only these folders hold packages."""
    paths = os.pathsep.join(map(str, folders))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "LD_"))}
    # Without site's folders, in which cuda-bindings looks for NVRTC.
    command = [sys.executable, "-S", "-c", CHOOSE]
    done = subprocess.run(command, env=environment | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


def packages() -> list[Path]:
    """Where Plait's kernels lie, torch, and cuda-bindings if they are there."""
    bindings = [] if BINDINGS is None else [*map(Path, BINDINGS.submodule_search_locations or ())]
    found = (Path(plait_kernels.__file__).parent, Path(torch.__file__).parent, *bindings)
    return [folder.parent for folder in found]


@pytest.mark.skipif(BINDINGS is not None, reason="cuda-bindings is here")
def test_without_cuda_bindings_other_kernels_compute_and_one_line_names_the_package() -> None:
    reason = "needs the package cuda-bindings"
    assert choose(*packages()) == (
        [OTHERS, reason],
        [f"kernels in CUDA C++ are not used, slower ones are: {reason}"],
    )


@pytest.mark.skipif(BINDINGS is None, reason="no cuda-bindings; pip install 'plait[test]'")
def test_without_nvrtc_other_kernels_compute_and_one_line_names_the_package() -> None:
    (chosen, reason), logged = choose(*packages())
    assert chosen == OTHERS
    assert re.match(r"needs NVRTC, the package nvidia-cuda-nvrtc(-cu12)?, which cuda-bindings cannot load: \S", reason)
    assert logged == [f"kernels in CUDA C++ are not used, slower ones are: {reason}"]
