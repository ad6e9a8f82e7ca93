"""The configuration file of a worker, from the settings of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from plait_proto import (
    AttentionConfig,
    DeviceConfig,
    KvCacheConfig,
    PageConfig,
    ParallelConfig,
    SharedExperts,
    WorkerConfig,
)

from plait.launch.remote_ranks import num_own_ranks
from plait.settings import DRAFT_TOKENS, GroupMembership, ServeSettings

Config = TypeVar("Config", bound=msgspec.Struct)


def worker_config(
    settings: ServeSettings, model: Path, run_dir: Path, max_model_len: int, group: GroupMembership | None = None
) -> WorkerConfig:
    """What every rank is given. `max_model_len` is the model's context, or what the user limits it to.

    The batch sizes are filled in.
    """
    max_batch_tokens, max_seqs = settings.scheduler.max_batch_tokens, settings.scheduler.max_seqs
    assert max_batch_tokens is not None, "with_batch_sizes fills it in"
    assert max_seqs is not None, "with_batch_sizes fills it in"
    shared = _shared_experts(settings, group)
    return WorkerConfig(
        model=str(model),
        run_dir=str(run_dir),
        parallel=ParallelConfig(
            world=settings.process.tp,
            dp=settings.process.dp,
            dp_attention=settings.process.dp_attention,
            group=shared,
            meets_by_engine=settings.hosts.rank_hosts > 1 or shared is not None,
            ranks_per_host=num_own_ranks(settings),
        ),
        load_format=settings.model.load_format,
        dtype=settings.model.dtype,
        quantization=settings.model.quantization,
        device=_fields_of(settings.device, DeviceConfig),
        attention=_fields_of(settings.attention, AttentionConfig),
        kv_cache=_fields_of(settings.kv_cache, KvCacheConfig),
        pages=_fields_of(settings.pages, PageConfig),
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
        draft_tokens=DRAFT_TOKENS,
        threads=settings.process.threads,
        log_level=settings.process.log_level,
    )


def _shared_experts(settings: ServeSettings, group: GroupMembership | None) -> SharedExperts | None:
    """This engine's part in a group of engines whose replicas share experts; None if there is no other engine."""
    if group is None or group.num_engines == 1 or not settings.process.dp_attention:
        return None
    num_own = settings.process.dp
    return SharedExperts(first_replica=group.engine * num_own, num_replicas=group.num_engines * num_own)


def _fields_of(component: msgspec.Struct, config: type[Config]) -> Config:
    """The fields of `config`, which have the names of the settings in `component`."""
    return msgspec.convert(component, config, from_attributes=True)
