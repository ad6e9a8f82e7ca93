"""Which rank runs where: a pure function of nodes, GPUs, --tp, --dp and --dp-attention."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from plait.errors import SettingsError
from plait.nodes.place import with_port


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    """Through all nodes."""
    node: int
    local_rank: int
    gpu: int | None
    """Index among the node's visible GPUs; None: it computes on the CPU."""
    replica: int


class PortUse(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP port that some process opens."""

    node: int | None
    """None: each node opens it."""
    host: str
    port: int
    purpose: str

    @property
    def address(self) -> str:
        return with_port(self.host, self.port)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A server over `num_nodes` nodes. Each node has one engine with whole replicas."""

    num_nodes: int
    tp: int
    dp: int
    dp_attention: bool
    has_gpus: bool

    @property
    def replicas_per_node(self) -> int:
        return self.dp // self.num_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.replicas_per_node * self.tp

    def ranks(self) -> Iterator[RankPlace]:
        for rank in range(self.dp * self.tp):
            local = rank % self.ranks_per_node
            yield RankPlace(
                rank=rank,
                node=rank // self.ranks_per_node,
                local_rank=local,
                gpu=local if self.has_gpus else None,
                replica=rank // self.tp,
            )

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def plan_layout(*, num_nodes: int, tp: int, dp: int, dp_attention: bool, gpus_per_node: int) -> Layout:
    """The layout; `gpus_per_node` is 0 for ranks on CPUs. Raises `SettingsError` if there is none."""
    if dp % num_nodes:
        nearest = -(-dp // num_nodes) * num_nodes
        raise SettingsError(
            f"--dp is {dp} on {num_nodes} nodes; each node takes equally many whole replicas: give --dp {nearest}, or "
            "another multiple of --nnodes"
        )
    layout = Layout(num_nodes=num_nodes, tp=tp, dp=dp, dp_attention=dp_attention, has_gpus=gpus_per_node > 0)
    if layout.has_gpus and layout.ranks_per_node > gpus_per_node:
        raise SettingsError(
            f"--dp {dp} and --tp {tp} on {num_nodes} nodes put {layout.ranks_per_node} ranks on a node, which has "
            f"{gpus_per_node} GPUs; lower --tp or --dp, or take more nodes"
        )
    return layout


def listeners(layout: Layout, head: str, head_port: int, http: tuple[str, int]) -> Iterator[PortUse]:
    """The ports that the nodes open."""
    if layout.num_nodes > 1:
        yield PortUse(node=0, host=head, port=head_port, purpose="the nodes' launchers meet (CURVE, listed keys)")
        yield PortUse(node=0, host=head, port=votes_port(head_port), purpose="the engines vote (CURVE, listed keys)")
    yield PortUse(node=None, host=http[0], port=http[1], purpose="HTTP of each node's engine")


def votes_port(head_port: int) -> int:
    """Where engine 0 listens for the other engines."""
    return head_port + 1


def layout_lines(layout: Layout, ports: list[PortUse]) -> Iterator[str]:
    """The layout as a table."""
    kind = "share experts and step together (--dp-attention)" if layout.dp_attention else "of the whole model"
    counts = f"{layout.num_nodes} nodes, {layout.dp * layout.tp} ranks: {layout.dp} replicas"
    yield f"{counts} {kind}, {layout.tp} ranks each"
    yield f"  {'rank':>5} {'node':>5} {'device':>7} {'replica':>8}"
    for one in layout.ranks():
        device = "cpu" if one.gpu is None else f"gpu {one.gpu}"
        yield f"  {one.rank:>5} {one.node:>5} {device:>7} {one.replica:>8}"
    width = max(len(port.address) for port in ports)
    for port in ports:
        who = "each node" if port.node is None else f"node {port.node}"
        yield f"  {port.address:<{width}}  {who}: {port.purpose}"
