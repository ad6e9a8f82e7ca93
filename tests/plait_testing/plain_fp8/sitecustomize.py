"""Python reads this at its start if its folder is on the path: ranks then compute FP8 as `bench.gpu.plain_fp8` says.

``PLAIT_TEST_FP8_RULES=FILE`` names the rules, which are read again at each step. `tests` has to be on the path too.
"""

import os
import sys
from pathlib import Path

if "plait_worker" in sys.orig_argv and (file := os.environ.get("PLAIT_TEST_FP8_RULES")):
    from bench.gpu import plain_fp8

    plain_fp8.install(Path(file))
