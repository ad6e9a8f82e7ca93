"""An engine from its settings, and the file that its workers read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
from plait_proto import ExitCode, config_fingerprint, encode_config

from plait._router import Engine, ModelFilesError
from plait.batch_sizes import check_chunk, with_batch_sizes
from plait.errors import StartError
from plait.http.engine import Description
from plait.launch.group_checks import with_facts
from plait.launch.worker_config import worker_config
from plait.model_files import LocalModel
from plait.nvidia import gpu_memory_bytes, is_hopper
from plait.page_size import with_page_size
from plait.settings import GroupMembership, RemoteWorkers, ServeSettings, engine_settings


def with_sizes(settings: ServeSettings, local: LocalModel, environment: Mapping[str, str]) -> tuple[ServeSettings, str]:
    """The settings with batch and page sizes, and where the batch sizes come from.

    Raises `SettingsError` for sizes that do not fit.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    settings, reason = with_batch_sizes(
        settings, local.path, partial(gpu_memory_bytes, visible), partial(is_hopper, visible)
    )
    check_chunk(settings.scheduler)
    return with_page_size(settings, local.path), reason


@contextlib.contextmanager
def open_engine(
    local: LocalModel,
    settings: ServeSettings,
    run_dir: Path,
    hash_key: str,
    group: GroupMembership | None = None,
    remote: RemoteWorkers | None = None,
) -> Iterator[Engine]:
    """The engine, closed at the end; raises `StartError`."""
    membership = with_facts(group, local, settings) if group is not None else None
    engine_json = engine_settings(settings, str(local.path), local.name, str(run_dir), membership, hash_key, remote)
    try:
        engine = Engine(msgspec.json.encode(engine_json))
    except ModelFilesError as error:
        raise StartError(str(error), ExitCode.MODEL_FILES) from error
    except ValueError as error:
        raise StartError(str(error), ExitCode.SETTINGS) from error
    except OSError as error:
        raise StartError(
            f"the engine cannot start: {error}; free memory, or the resource that ran out", ExitCode.HARDWARE
        ) from error
    with contextlib.closing(engine):
        yield engine


def write_config(
    engine: Engine,
    local: LocalModel,
    settings: ServeSettings,
    description: Description,
    run_dir: Path,
    group: GroupMembership | None = None,
) -> Path:
    """Write the worker's configuration file and give the engine its fingerprint."""
    raw = encode_config(worker_config(settings, local.path, run_dir, description.max_model_len, group))
    engine.set_config_fingerprint(config_fingerprint(raw))
    path = run_dir / "worker.json"
    path.write_bytes(raw)
    return path
