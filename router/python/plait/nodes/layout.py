"""Which rank runs where: a pure function of nodes, GPUs, --tp, --dp and --dp-attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    """A server over `num_nodes` nodes: an engine with whole replicas on each, or one on the head for all ranks."""

    num_nodes: int
    tp: int
    dp: int
    dp_attention: bool
    has_gpus: bool

    @property
    def spans_nodes(self) -> bool:
        """A replica may have ranks on several nodes: the head has the one engine."""
        return self.dp % self.num_nodes != 0

    @property
    def replicas_per_engine(self) -> int:
        return self.dp if self.spans_nodes else self.dp // self.num_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.dp * self.tp // self.num_nodes

    def has_engine(self, node: int) -> bool:
        return node == 0 or not self.spans_nodes

    def first_rank_of_engine(self, node: int) -> int:
        """The rank that the engine which `node` belongs to calls rank 0."""
        return 0 if self.spans_nodes else self.ranks_of(node).start

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

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

    def replicas_with_remote_ranks(self) -> list[int]:
        """Those with ranks on other nodes than their engine."""
        if not self.spans_nodes:
            return []
        return [replica for replica in range(self.dp) if self.node_of((replica + 1) * self.tp - 1) > 0]

    def split_replicas(self) -> list[int]:
        """Those whose ranks are on several nodes: their collectives cross the network."""
        ends = ((replica, replica * self.tp, (replica + 1) * self.tp - 1) for replica in range(self.dp))
        return [replica for replica, first, last in ends if self.node_of(first) != self.node_of(last)]

    @property
    def computes_across_nodes(self) -> bool:
        """Ranks of several nodes take part in one collective."""
        return self.num_nodes > 1 and (self.dp_attention or bool(self.split_replicas()))

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


def plan_layout(*, num_nodes: int, tp: int, dp: int, dp_attention: bool, gpus_per_node: int) -> Layout:
    """The layout; `gpus_per_node` is 0 for ranks on CPUs. Raises `SettingsError` if there is none."""
    layout = Layout(num_nodes=num_nodes, tp=tp, dp=dp, dp_attention=dp_attention, has_gpus=gpus_per_node > 0)
    if dp * tp % num_nodes:
        nearest = -(-dp // num_nodes) * num_nodes
        raise SettingsError(
            f"--dp {dp} times --tp {tp} are {dp * tp} ranks on {num_nodes} nodes; each node takes equally many: give "
            f"--dp {nearest} for whole replicas on each node, or a --tp that divides"
        )
    if layout.spans_nodes and dp_attention:
        raise SettingsError(
            f"--dp is {dp} on {num_nodes} nodes; with --dp-attention each node takes equally many whole replicas: give "
            "another multiple of --nnodes"
        )
    if layout.has_gpus and layout.ranks_per_node > gpus_per_node:
        raise SettingsError(
            f"--dp {dp} and --tp {tp} on {num_nodes} nodes put {layout.ranks_per_node} ranks on a node, which has "
            f"{gpus_per_node} GPUs; lower --tp or --dp, or take more nodes"
        )
    return layout


def listeners(layout: Layout, head: str, head_port: int, doors: Mapping[str, tuple[str, int]]) -> Iterator[PortUse]:
    """The ports that the nodes open. `doors` are addresses of each engine, by what they are for."""
    if layout.num_nodes > 1:
        yield PortUse(node=0, host=head, port=head_port, purpose="the nodes' launchers meet (CURVE, listed keys)")
        if not layout.spans_nodes:
            purpose = "the engines vote (CURVE, listed keys)"
            yield PortUse(node=0, host=head, port=engine_port(head_port), purpose=purpose)
        for replica in layout.replicas_with_remote_ranks():
            purpose = f"replica {replica}'s ranks on other nodes connect (CURVE, listed keys)"
            yield PortUse(node=0, host=head, port=engine_port(head_port) + replica, purpose=purpose)
    node = 0 if layout.spans_nodes else None
    for purpose, (host, port) in doors.items():
        yield PortUse(node=node, host=host, port=port, purpose=f"{purpose} of each node's engine")


def engine_port(head_port: int) -> int:
    """Where engine 0 listens for other engines, or for other nodes' ranks of its first replica."""
    return head_port + 1


def link_warning(layout: Layout, link: str) -> str:
    """What is said if collectives of tensor parallelism cross `link`, the network between nodes; else empty."""
    if not (split := layout.split_replicas()):
        return ""
    which = f"replica {split[0]} has" if len(split) == 1 else f"{len(split)} replicas have"
    return (
        f"warning: {which} ranks on several nodes: two all-reduces a layer cross {link}; where a node holds a replica, "
        "a --dp that is a multiple of --nnodes is faster"
    )


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
