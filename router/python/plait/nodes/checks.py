"""The preflight: a pure function of what the nodes say, as one table and what to do for each failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from plait_proto import ExitCode
from plait_proto.all_reduce_check import Reduced

from plait.nodes.layout import Layout
from plait.nodes.messages import Cause, Facts, ModelFiles
from plait.shared_memory import shm_note

MAX_CLOCK_SECONDS = 60.0
MIN_OPEN_FILES = 4096
CHECKS = (
    "version",
    "settings",
    "model",
    "gpus",
    "peers",
    "memory",
    "shm",
    "memlock",
    "files",
    "clock",
    "ports",
    "pairs",
    "reduce",
)
"""In the order of the table."""

Reached = Mapping[int, Mapping[int, str | None]]
"""By node: why each other node cannot be reached from it, or None."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something about a node that is wrong, or that slows it down."""

    node: int
    check: str
    text: str
    """What is there, what should be, what to do."""
    code: ExitCode | None
    """Exit code of a failure; None: the server starts all the same."""


def find_faults(nodes: Sequence[Facts], layout: Layout, clocks: Mapping[int, float], reached: Reached) -> list[Finding]:
    """What is wrong. `nodes` begin with the head's; `clocks` are seconds ahead of the head's."""
    found: list[Finding] = []
    for facts in nodes:
        found += _of_versions(facts, nodes[0])
        found += _of_settings(facts, nodes[0])
        found += _of_model(facts, nodes[0])
        found += _of_gpus(facts, nodes[0], layout)
        found += _of_peers(facts)
        found += _of_memory(facts, layout)
        found += _of_limits(facts, layout)
        found += _of_clock(facts.node, clocks.get(facts.node, 0.0))
        found += (
            _fault(facts, "ports", f"{why}; end what holds it, or give another", ExitCode.SETTINGS)
            for why in facts.machine.taken_ports
        )
        found += _of_pairs(facts, nodes, reached.get(facts.node, {}))
    return found


def _fault(facts: Facts, check: str, text: str, code: ExitCode | None) -> Finding:
    return Finding(node=facts.node, check=check, text=text, code=code)


def _of_versions(facts: Facts, head: Facts) -> Iterator[Finding]:
    own, heads = facts.versions, head.versions
    if own.plait != heads.plait:
        text = f"Plait {own.plait or 'without a version'}, node 0 has {heads.plait}; install the same on all nodes"
        yield _fault(facts, "version", text, ExitCode.SETTINGS)
    if own.torch != heads.torch:
        text = f"torch {own.torch or 'is missing'}, node 0 has {heads.torch or 'none'}; install the same on all nodes"
        yield _fault(facts, "version", text, ExitCode.SETTINGS)
    if _minor(own.python) != _minor(heads.python):
        text = f"Python {own.python}, node 0 has {heads.python}; install the same on all nodes"
        yield _fault(facts, "version", text, None)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _of_settings(facts: Facts, head: Facts) -> Iterator[Finding]:
    for flag in sorted(facts.settings.keys() | head.settings.keys()):
        own, heads = (one.settings.get(flag, "the default") for one in (facts, head))
        if own != heads:
            text = f"{flag} is {own}, on node 0 {heads}; give the same on all nodes"
            yield _fault(facts, "settings", text, ExitCode.SETTINGS)


def _of_model(facts: Facts, head: Facts) -> Iterator[Finding]:
    text = facts.model.problem or (_difference(facts.model, head.model) if not head.model.problem else "")
    if text:
        yield _fault(facts, "model", text, ExitCode.MODEL_FILES)


def _difference(own: ModelFiles, heads: ModelFiles) -> str:
    """The first file that is not as on the head."""
    for name in sorted(own.files.keys() | heads.files.keys()):
        what = name or "the file"
        if name not in own.files:
            return f"{own.path} lacks {what}, which node 0 has; copy the model again"
        if name not in heads.files:
            return f"{own.path} has {what}, which node 0 has not; use one copy of the model on all nodes"
        (size, digest), (heads_size, heads_digest) = own.files[name], heads.files[name]
        if size != heads_size:
            return f"{what} in {own.path} has {size:,} bytes, on node 0 {heads_size:,}; copy the model again"
        if digest != heads_digest:
            return f"{what} in {own.path} differs from node 0's; copy the model again"
    return ""


def _of_gpus(facts: Facts, head: Facts, layout: Layout) -> Iterator[Finding]:
    gpus, heads = facts.machine.gpus, head.machine.gpus
    if not layout.has_gpus:
        if gpus:
            text = f"{len(gpus)} GPUs, node 0 has none; check nvidia-smi there, or give --device cpu on all nodes"
            yield _fault(facts, "gpus", text, ExitCode.HARDWARE)
    elif len(gpus) < layout.ranks_per_node:
        text = (
            f"{len(gpus)} GPUs, {layout.ranks_per_node} ranks; check CUDA_VISIBLE_DEVICES and nvidia-smi, or lower --tp"
        )
        yield _fault(facts, "gpus", text, ExitCode.HARDWARE)
    elif (kinds := {gpu.name for gpu in gpus}) != {gpu.name for gpu in heads}:
        text = f"{', '.join(sorted(kinds))}, node 0 has {heads[0].name if heads else 'none'}; use GPUs of one kind"
        yield _fault(facts, "gpus", text, ExitCode.HARDWARE)
    elif gpus and heads and gpus[0].driver != heads[0].driver:
        text = f"driver {gpus[0].driver}, node 0 has {heads[0].driver}; install the same on all nodes"
        yield _fault(facts, "gpus", text, None)


def _of_peers(facts: Facts) -> Iterator[Finding]:
    if pairs := facts.machine.without_peer_access:
        names = ", ".join(f"{first} and {second}" for first, second in pairs[:4])
        more = f", {len(pairs) - 4} more pairs" if len(pairs) > 4 else ""
        text = f"GPUs {names}{more} cannot read each other's memory, NCCL goes by the host; see nvidia-smi topo -p2p r"
        yield _fault(facts, "peers", text, None)


def _of_memory(facts: Facts, layout: Layout) -> Iterator[Finding]:
    """Fails where the weights alone do not fit."""
    copies = (1 if layout.dp_attention else layout.dp) / layout.num_nodes
    needed = facts.model.num_bytes * copies
    free, what = facts.machine.free_bytes, "memory"
    if layout.has_gpus and facts.machine.gpus:
        needed /= layout.ranks_per_node
        free, what = min(gpu.free_bytes for gpu in facts.machine.gpus), "memory of a GPU"
    if free < needed:
        text = f"{free / 1e9:.1f} GB of {what} are free, the weights take {needed / 1e9:.1f}; end what holds it"
        yield _fault(facts, "memory", text, ExitCode.HARDWARE)


def _of_limits(facts: Facts, layout: Layout) -> Iterator[Finding]:
    machine = facts.machine
    if machine.open_files < MIN_OPEN_FILES:
        text = f"{machine.open_files} open files at most, {MIN_OPEN_FILES} are needed; raise `ulimit -Hn`"
        yield _fault(facts, "files", text, ExitCode.HARDWARE)
    if not layout.has_gpus:
        return
    if text := shm_note(machine.shm_bytes):
        yield _fault(facts, "shm", text, None)
    if machine.memlock_bytes is not None:
        text = f"{machine.memlock_bytes >> 10} KiB may be locked, RDMA wants no limit; ulimit -l unlimited"
        yield _fault(facts, "memlock", text, None)


def _of_clock(node: int, ahead: float) -> Iterator[Finding]:
    if abs(ahead) > MAX_CLOCK_SECONDS:
        word = "ahead of" if ahead > 0 else "behind"
        text = (
            f"the clock is {abs(ahead):,.0f} s {word} node 0's; set it: chronyc makestep, or timedatectl set-ntp true"
        )
        yield Finding(node=node, check="clock", text=text, code=ExitCode.HARDWARE)


def _of_pairs(facts: Facts, nodes: Sequence[Facts], problems: Mapping[int, str | None]) -> Iterator[Finding]:
    for other in nodes:
        if problem := problems.get(other.node):
            text = f"node {other.node} ({other.address}) cannot be reached from here: {problem}"
            yield _fault(facts, "pairs", text, ExitCode.RANK_LOST)


def find_reduce_faults(reduced: Mapping[int, Reduced]) -> Iterator[Finding]:
    """What the all-reduce between the nodes found, by node."""
    for node, one in sorted(reduced.items()):
        if one.problem:
            text = (
                f"{one.problem}; ranks exchange rows on any free TCP port: open all between the nodes on the interface "
                "that leads to the head, or name another with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
            yield Finding(node=node, check="reduce", text=text, code=ExitCode.RANK_LOST)


def describe_reduced(reduced: Reduced) -> str:
    """Of an all-reduce that got through."""
    rate = reduced.num_bytes / reduced.seconds / 1e9
    return (
        f"All-reduce of {reduced.num_bytes >> 20} MiB between the nodes ({reduced.backend}): "
        f"{reduced.seconds * 1e3:.1f} ms, {rate:.2f} GB/s"
    )


def table_lines(nodes: Sequence[Facts], found: Sequence[Finding]) -> Iterator[str]:
    """A line a node with a column a check, then what was found."""
    head = ["node", "host", "address", *CHECKS]
    rows = [head, *([str(one.node), one.host, one.address, *_cells(one.node, found)] for one in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    for one in found:
        yield f"  {'FAIL' if one.code is not None else 'note'} node {one.node} {one.check}: {one.text}"


def _cells(node: int, found: Sequence[Finding]) -> Iterator[str]:
    for check in CHECKS:
        own = [one for one in found if one.node == node and one.check == check]
        yield "FAIL" if any(one.code is not None for one in own) else "note" if own else "ok"


def first_cause(nodes: Sequence[Facts], found: Sequence[Finding]) -> Cause | None:
    """The failure that ends the start; None if there is none."""
    failures = [one for one in found if one.code is not None]
    if not failures:
        return None
    first = failures[0]
    host = next(one.host for one in nodes if one.node == first.node)
    more = f" (and {len(failures) - 1} more, above)" if len(failures) > 1 else ""
    reason = f"preflight: node {first.node} ({host}), {first.check}: {first.text}{more}"
    return Cause(code=int(first.code or 0), reason=re.sub(r"\s+", " ", reason))
