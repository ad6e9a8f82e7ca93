"""Run cargo: this machine's, or the toolchain that pip's build brought where there is none."""

import os
import shutil
import subprocess
import sys


def toolchain() -> dict[str, str]:
    """The environment in which cargo is found."""
    if shutil.which("cargo"):
        return dict(os.environ)
    print("plait: no cargo here; taking the toolchain that the build uses", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "puccinialin"], check=True)
    from puccinialin import setup_rust

    return {**os.environ, **setup_rust()}


if __name__ == "__main__":
    environment = toolchain()
    os.environ.update(environment)
    os.execvpe("cargo", ["cargo", *sys.argv[1:]], environment)
