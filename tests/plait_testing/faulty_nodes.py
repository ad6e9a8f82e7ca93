"""Two nodes of `plait launch` that cannot start: one has a fault, or is cut off before all are ready."""

from __future__ import annotations

from pathlib import Path

import psutil
from plait.nodes.head import LOADED
from plait.nodes.key_files import write_new_keys

from plait_testing.node_network import NodeNetwork
from plait_testing.running_server import Server

PHASES = ("meet", "preflight", "load", "capture")
MEET_SECONDS = 5
"""How long nodes wait for each other where one never comes."""
_LAST_LINES = {"preflight": (0, "Node 1 is"), "load": (1, "Preflight passed"), "capture": (0, LOADED)}
"""The node and its line behind which a phase goes on."""


def cut_off_while(
    phase: str, network: NodeNetwork, folder: Path, model: Path, keys: Path, *layout: str
) -> list[Server]:
    """Two nodes, the second of them cut off in a phase of their start."""
    if phase == "meet":
        network.cut_off(1)
    nodes = network.launch_all(folder, model, keys, *layout, "--meet-timeout-seconds", str(MEET_SECONDS))
    if phase != "meet":
        node, line = _LAST_LINES[phase]
        nodes[node].read_line(line)
        network.cut_off(1)
    return nodes


def start_with_fault(
    fault: str, network: NodeNetwork, folder: Path, model: Path, keys: Path, *layout: str
) -> list[Server]:
    """Two nodes, the second of them with a fault that the preflight has to find."""
    places = [network.place(node, keys) for node in (0, 1)]
    flags, models, environment = [[*layout], [*layout]], [model, model], {}
    match fault:
        case "a wrong version":
            info = folder / "other" / "plait-9.9.9.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plait\nVersion: 9.9.9\n")
            environment["PYTHONPATH"] = f"{info.parent}:{psutil.Process().environ().get('PYTHONPATH', '')}"
        case "another setting":
            flags[1] += ["--max-seqs", "8"]
        case "a shorter file" | "a missing file":
            models[1] = copy_of(model, folder / model.name, is_shorter=fault == "a shorter file")
        case "no model":
            models[1] = folder / "nowhere"
        case "a wrong key":
            write_new_keys(folder / "other-keys", 2)
            places[1] = network.place(1, folder / "other-keys")
            flags[0] += ["--meet-timeout-seconds", "6"]
        case "a clock off by an hour":
            (folder / "other").mkdir()
            shift = "import time; now = time.time; time.time = lambda: now() + 3600"
            (folder / "other" / "sitecustomize.py").write_text(shift)
            environment["PYTHONPATH"] = f"{folder / 'other'}:{psutil.Process().environ().get('PYTHONPATH', '')}"
        case "a port in use":
            flags[1] += ["--port", str(network.hold_port(1))]
    return [
        network.launch(
            node,
            folder / f"node-{node}.log",
            models[node],
            *places[node],
            *flags[node],
            **(environment if node == 1 else {}),
        )
        for node in (1, 0)
    ][::-1]


def copy_of(model: Path, folder: Path, *, is_shorter: bool) -> Path:
    """The model with a fault in its weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and (file.suffix != ".safetensors" or is_shorter):
            content = file.read_bytes()
            (folder / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return folder
