"""What was rehearsed is compiled and loaded as its launches then look for it, with nothing launched before."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton; pip install triton", allow_module_level=True)

CHILD = Path(__file__).with_name("rehearsed.py")
VARIANTS = ["_add_rms_norm", *["_decode"] * 3, *["_merge"] * 3, *["_multiply_few"] * 3]
"""Of three steps: one norm for all, else one for each step."""


def run(cache: Path) -> dict[str, Any]:
    """What the child says, for an H200 whatever is here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, CHILD], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_rehearsed_kernels_are_compiled_once_and_launched_later(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    for told in (first, second):
        assert told["inside"] == 0
        assert told["other"] == [False]  # another library's kernel is launched as ever
        assert [name for name in told["ready"] if name != "somebody_elses"] == VARIANTS
        # The launches neither compile, nor look in the cache, nor load: all is there, also what starts early.
        assert told["launched"] == told["rehearsed"] | {"launched": 3 * 3 + 3}
        assert "arange" in told["refused"]  # what does not compile fails where it is launched
    assert first["found"] == 0
    assert second["found"] == second["rehearsed"]["compiled"]
