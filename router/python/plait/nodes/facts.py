"""What a node can say of itself without loading anything."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import platform
import resource
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from plait_proto import UNDECODABLE

from plait.errors import ModelNotFoundError, SettingsError
from plait.flags import flags
from plait.hub_settings import HubSettings
from plait.launch.rank_interface import interface_to
from plait.model_files import find_model
from plait.nodes.messages import Facts, Gpu, Machine, ModelFiles, Versions
from plait.nodes.place import with_port
from plait.nodes.settings import LaunchSettings
from plait.nvidia import NVIDIA_SMI_SECONDS, pairs_without_peer_access, visible_lines
from plait.shared_memory import shm_bytes

MEMORY = Path("/proc/meminfo")
MAX_TEXT_BYTES = 64 << 20
MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".gguf", ".model")
OF_EACH_NODE = frozenset(
    (
        *("host", "port", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "uds", "download_dir"),
        *("admin_host", "admin_port", "admin_key_file", "profile_dir"),
        *("kv_events_endpoint", "kv_events_replay_endpoint", "otlp_traces_endpoint"),
        *("kv_hash_key_file", "threads", "text_threads", "log_level", "step_trace"),
    )
)
"""Settings that may differ from node to node."""
BY_CONTENT = frozenset(("chat_template",))
"""Settings that name a file: its content must be equal, wherever it lies."""


def collect_facts(
    *,
    node: int,
    address: str,
    address_reason: str,
    model: str | None,
    settings: LaunchSettings,
    gpus: tuple[Gpu, ...],
    ports: Sequence[tuple[str, int]],
    probe_port: int,
) -> Facts:
    """The facts of this node. `ports` are those that its processes will open."""
    return Facts(
        node=node,
        host=socket.gethostname(),
        address=address,
        address_reason=address_reason,
        session=secrets.token_hex(8),
        versions=Versions(plait=_version("plait"), python=platform.python_version(), torch=_version("torch")),
        settings=dict(_shared_settings(settings)),
        model=read_model_files(model, settings.hub),
        machine=_machine(gpus, ports),
        probe_port=probe_port,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shared_settings(settings: LaunchSettings) -> Iterator[tuple[str, str]]:
    """Flags that are not at their defaults and must be equal on all nodes."""
    for field in msgspec.structs.fields(LaunchSettings):
        component = getattr(settings, field.name)
        for flag in flags(field.type, field.default) if field.name != "nodes" else ():
            value = getattr(component, flag.field)
            if flag.field not in OF_EACH_NODE and value != flag.default:
                yield flag.name, _describe_file(str(value)) if flag.field in BY_CONTENT else str(value)


def _describe_file(path: str) -> str:
    """What two nodes compare. A file that cannot be read is left to the engine, which refuses it."""
    try:
        return f"a file whose SHA-256 begins with {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
    except OSError:
        return path


def read_model_files(model: str | None, hub: HubSettings) -> ModelFiles:
    """Names and sizes of the model's files, and digests of small ones."""
    try:
        path = find_model(model, hub).path
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES]
        found = {"" if path.is_file() else file.name: (file.stat().st_size, _digest(file)) for file in files}
    except ModelNotFoundError as error:
        return ModelFiles(path=str(model), files={}, problem=error.message)
    except OSError as error:
        return ModelFiles(path=str(model), files={}, problem=f"{error.filename}: {error.strerror}; check the files")
    return ModelFiles(path=str(path), files=found, problem=_missing_shard(path, set(found)))


def _digest(file: Path) -> str:
    is_text = file.suffix in (".json", ".jinja") and file.stat().st_size <= MAX_TEXT_BYTES
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if is_text else ""


def _missing_shard(path: Path, names: set[str]) -> str:
    """Names a file of weights that the index lists and the folder lacks."""
    index = path / "model.safetensors.index.json"
    if path.is_file() or not index.is_file():
        return ""
    try:
        listed = set(msgspec.json.decode(index.read_bytes())["weight_map"].values())
    except (*UNDECODABLE, KeyError, TypeError, AttributeError):
        return f"{index} has no weight_map; copy the model again"
    missing = sorted(listed - names)
    return f"{path} lacks {missing[0]}, which its index lists; copy the model again" if missing else ""


def find_gpus(visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves; none without `nvidia-smi`."""
    query = "--query-gpu=uuid,name,driver_version,memory.free,index"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
        lines = visible_lines(done.stdout, visible_devices)
        return tuple(
            Gpu(name=name, driver=driver, free_bytes=int(free) << 20, index=int(index))
            for _, name, driver, free, index in lines
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _machine(gpus: tuple[Gpu, ...], ports: Sequence[tuple[str, int]]) -> Machine:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return Machine(
        gpus=gpus,
        without_peer_access=tuple(pairs_without_peer_access([gpu.index for gpu in gpus]) if len(gpus) > 1 else ()),
        free_bytes=_free_memory(),
        shm_bytes=shm_bytes(),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        taken_ports=tuple(why for host, port in ports if port and (why := why_taken(host, port))),
    )


def describe_link(address: str) -> str:
    """The interface that has `address`, with its rate if the driver says one: `eth0 (10.0.0.1, 25 Gbit/s)`."""
    try:
        name = interface_to(f"tcp://{with_port(address, 1)}")
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except SettingsError:
        return address
    except (OSError, ValueError):
        megabits = 0
    return f"{name} ({address}, {megabits / 1000:g} Gbit/s)" if megabits > 0 else f"{name} ({address})"


def _free_memory() -> int:
    lines = MEMORY.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def why_taken(host: str, port: int) -> str:
    """Why `port` cannot be opened; empty if it can."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is in use"
        return f"port {port} on {host} cannot be opened: {error.strerror}"
    return ""
