"""``python -m plait_worker``: a rank's process, see ``plait_worker.process``."""

import gc

if __name__ == "__main__":
    # Modules stay for good. To look through them for garbage as they are loaded takes a fifth of the start.
    gc.disable()
    from plait_worker.process import exit_now, main

    gc.freeze()
    gc.enable()
    exit_now(main())
