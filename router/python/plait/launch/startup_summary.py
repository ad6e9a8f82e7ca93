"""The lines on standard output when the server is ready."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from plait.http.engine import Description, ReplicaStatus, SlotState, Status
from plait.http.key_terms import NAMES
from plait.launch.listen import UNIX
from plait.launch.unused_settings import unused_settings
from plait.output import say
from plait.settings import ServeSettings

READY = "Plait is ready: "
"""Scripts read the URL after these words."""


def print_startup_summary(description: Description, status: Status, settings: ServeSettings, url: str) -> None:
    """Print model, memory, context, settings without effect, URL, and a command to try."""
    say(f"  model    {description.model_id} ({description.architecture}), {status.dtype} on {status.device}")
    for line in _memory_lines(status, settings):
        say(line)
    say(f"  context  {description.max_model_len:,} tokens")
    if unused := _unused(settings, description, status):
        say(f"  unused   {unused}")
    say(f"{READY}{url}")
    say("Ask it something:")
    say("  " + curl_line(url, description.model_id, settings.http.api_key_file))


def _unused(settings: ServeSettings, description: Description, status: Status) -> str:
    keeps_slot_state = status.slot_state is not None
    return unused_settings(settings, description.architecture, status.device, keeps_slot_state)


def _memory_lines(status: Status, settings: ServeSettings) -> Iterator[str]:
    page_size, num_ranks = settings.pages.page_size, settings.process.tp
    assert page_size is not None, "with_page_size fills it in"
    max_seqs = settings.scheduler.max_seqs
    if len(status.replicas) < 2:
        yield f"  memory   {_memory(status, page_size)}"
        if status.slot_state is not None:
            yield f"  cache    {_cache(status, status.slot_state, page_size, max_seqs)}"
        return
    for number, replica in enumerate(status.replicas):
        first, last = number * num_ranks, (number + 1) * num_ranks - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        yield f"  replica {number}, {ranks}: {_memory(replica, page_size)}"
        if replica.slot_state is not None:
            yield f"  replica {number}, {ranks}: {_cache(replica, replica.slot_state, page_size, max_seqs)}"


def _memory(status: ReplicaStatus, page_size: int) -> str:
    pages = status.num_pages
    return (
        f"weights {_bytes(status.weight_bytes)}, KV {_bytes(pages * status.page_bytes)}: "
        f"{pages:,} pages of {page_size} = {pages * page_size:,} tokens"
    )


def _cache(status: ReplicaStatus, slot_state: SlotState, page_size: int, max_seqs: int | None) -> str:
    """What a token, a slot and a snapshot take, and how many there are."""
    plural = "" if slot_state.num_snapshots == 1 else "s"
    snapshots = f"{slot_state.num_snapshots:,} snapshot{plural} of {_bytes(slot_state.snapshot_bytes)}"
    slots = f"{max_seqs:,} slots" if max_seqs is not None else "each slot"
    return (
        f"{status.page_bytes // page_size:,} bytes a token, {slots} of {_bytes(slot_state.slot_bytes)}, "
        f"{snapshots} (prefixes are found where a snapshot is)"
    )


def _bytes(count: int) -> str:
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def curl_line(url: str, model: str, key_file: str | None) -> str:
    """A shell command that streams a first response."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "stream": True}
    at = ["--unix-socket", url.removeprefix(UNIX), "http://localhost"] if url.startswith(UNIX) else [url]
    words = ["curl", "-N", *at[:-1], f"{at[-1]}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", msgspec.json.encode(body).decode()])
    if key_file is None:
        return line
    first_key = f"sed -E 's/[[:space:]]+({'|'.join(NAMES)})=.*//;q' {shlex.quote(str(Path(key_file).absolute()))}"
    return f'{line} -H "Authorization: Bearer $({first_key})"'
