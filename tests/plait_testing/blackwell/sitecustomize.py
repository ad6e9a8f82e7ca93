"""Python runs this in every process of a server whose PYTHONPATH begins here.

In worker processes it puts the stand-in for Blackwell's kernels in place, tells the worker of such a GPU, and in the
end writes to standard error what was called.
"""

import os
import sys
from typing import NoReturn

if "plait_worker" in sys.orig_argv:
    from plait_testing.trtllm_gen import Launcher, replace_launcher
    from plait_worker.attention import selection

    launcher = Launcher()
    replace_launcher(launcher)
    vars(selection)["compute_capability"] = lambda device: (10, 0)
    end = os._exit

    def report_and_end(code: int) -> NoReturn:
        """Workers end without the interpreter's own end."""
        print(f"stand-in calls: {dict(launcher.calls)}", file=sys.stderr, flush=True)
        end(code)

    vars(os)["_exit"] = report_and_end
