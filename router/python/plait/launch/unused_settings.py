"""Settings that were given but have no effect in this server."""

from __future__ import annotations

from collections.abc import Iterator

from plait_proto import family

from plait.http.key_terms import READERS
from plait.settings import AttentionSettings, DeviceSettings, PageSettings, SchedulerSettings, ServeSettings


def unused_settings(settings: ServeSettings, architecture: str, device: str, keeps_slot_state: bool = False) -> str:
    """Each such setting with the reason, in one line; empty if there are none.

    ``architecture`` is the family's name, ``device`` what the worker computes on. Settings equal to their defaults
    are not listed. ``keeps_slot_state``: the worker reports bytes for each slot.
    """
    of_device = (*_of_graphs(settings.device, device), *_of_mla(settings.attention, architecture))
    of_slots = _of_slot_state(settings.pages, keeps_slot_state)
    return "; ".join((*of_device, *of_slots, *_of_priorities(settings.scheduler)))


def _of_graphs(settings: DeviceSettings, device: str) -> Iterator[str]:
    default = DeviceSettings()
    off = "--no-cuda-graphs" if settings.cuda_graphs != default.cuda_graphs else None
    size = "--cuda-graph-max-bs" if settings.cuda_graph_max_bs != default.cuda_graph_max_bs else None
    if device.startswith("cpu"):
        if given := " and ".join(filter(None, (off, size))):
            yield f"{given} (a CPU captures no steps)"
        if settings.custom_all_reduce != default.custom_all_reduce:
            yield "--no-custom-all-reduce (CPUs reduce by gloo)"
    elif off and size:
        yield f"{size} ({off} captures no steps)"


def _of_mla(settings: AttentionSettings, architecture: str) -> Iterator[str]:
    given = settings.mla_context_chunk_size != AttentionSettings().mla_context_chunk_size
    if given and not family(architecture).uses_mla:
        yield "--mla-context-chunk-size (the model has no MLA)"


def _of_slot_state(settings: PageSettings, keeps_slot_state: bool) -> Iterator[str]:
    if keeps_slot_state:
        return
    default = PageSettings()
    number = "--num-snapshots" if settings.num_snapshots != default.num_snapshots else None
    interval = "--snapshot-interval" if settings.snapshot_interval != default.snapshot_interval else None
    if given := " and ".join(filter(None, (number, interval))):
        yield f"{given} (the model keeps no state for each slot)"


def _of_priorities(settings: SchedulerSettings) -> Iterator[str]:
    given = settings.priority_aging_seconds != SchedulerSettings().priority_aging_seconds
    if given and settings.policy not in READERS["priority"]:
        yield f"--priority-aging-seconds (--policy {settings.policy} reads no priorities)"
