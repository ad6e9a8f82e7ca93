"""From a configuration to a rank that is ready for plans."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from plait_proto import PROTOCOL, SCHEMA_FINGERPRINT, ExitCode, Hello, Welcome, WorkerConfig, config_fingerprint, encode

from plait_worker.attention.cpu import cpu_attention
from plait_worker.cache import KVCache, bytes_per_page
from plait_worker.capacity import choose_num_pages
from plait_worker.device import open_device
from plait_worker.failure import Failure
from plait_worker.link import Link
from plait_worker.loop import Rank
from plait_worker.machine import free_memory_bytes
from plait_worker.models import Model, load_model
from plait_worker.models.decoder import HeadsDecoder
from plait_worker.parallel import Parallel
from plait_worker.rendezvous import meet
from plait_worker.same_files import refuse_other_files
from plait_worker.slots import Slots
from plait_worker.weights import ModelFilesError

_log = logging.getLogger(__name__)


def start(link: Link, config: WorkerConfig, config_bytes: bytes, rank: int) -> Rank | None:
    """Load the model, say Hello, and allocate what Welcome says; None where the engine drains instead.

    Raises ``Failure`` where one of these cannot be.
    """
    device, device_name = open_device(config)
    parallel = meet(config, rank)
    model = _load(config, device, parallel)
    _leave_cores_to_kernels(model)
    link.send(encode(_hello(config, config_bytes, model, parallel, device_name)))
    welcome = link.welcome()
    if welcome is None:
        return None
    _log.info("rank %d of %d on %s: %d pages", rank, config.world, device_name, welcome.num_pages)
    return _allocate(config, welcome, model, parallel, device)


def _load(config: WorkerConfig, device: torch.device, parallel: Parallel) -> Model[Any]:
    """The model; every rank reads the same files, and measures memory before any of them fills it."""
    path, free_bytes = Path(config.model), free_memory_bytes()
    try:
        refuse_other_files(path, parallel)
        model = load_model(path, config.dtype, device, parallel, free_bytes)
    except ModelFilesError as error:
        raise Failure(ExitCode.MODEL_FILES, str(error)) from error
    except ValueError as error:
        raise Failure(ExitCode.SETTINGS, str(error)) from error
    parallel.wait_for_all()
    return model


def _leave_cores_to_kernels(model: Model[Any]) -> None:
    """One thread for torch where the compiled kernels do all that is worth two: its others would spin in their way."""
    if isinstance(model, HeadsDecoder) and model.stack is not None:
        torch.set_num_threads(1)
        _log.info("the decoder's layers run as one compiled call a step")


def _hello(config: WorkerConfig, config_bytes: bytes, model: Model[Any], parallel: Parallel, device_name: str) -> Hello:
    page_bytes = bytes_per_page(model.cache_spec, config.page_size)
    return Hello(
        protocol=PROTOCOL,
        schema=SCHEMA_FINGERPRINT,
        config=config_fingerprint(config_bytes),
        rank=parallel.rank,
        world=parallel.world,
        pid=os.getpid(),
        device=device_name,
        dtype=str(model.dtype).removeprefix("torch."),
        num_pages=choose_num_pages(config, page_bytes, model.weight_bytes, free_memory_bytes()),
        page_bytes=page_bytes,
        weight_bytes=model.weight_bytes,
    )


def _allocate(
    config: WorkerConfig, welcome: Welcome, model: Model[Any], parallel: Parallel, device: torch.device
) -> Rank:
    num_pages, page_size = welcome.num_pages, config.page_size
    return Rank(
        model=model,
        cache=KVCache(model.cache_spec, num_pages, page_size, device),
        attention=cpu_attention(model.attention_shape, page_size, config.context_chunk),
        slots=Slots(welcome.num_slots, num_pages, page_size, config.max_model_len, device),
        parallel=parallel,
    )
