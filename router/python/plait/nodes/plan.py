"""What one node's launcher knows before it meets the others."""

from __future__ import annotations

import msgspec

from plait.nodes.environment import Environment
from plait.nodes.facts import collect_facts
from plait.nodes.key_files import NodeKeys
from plait.nodes.layout import Layout
from plait.nodes.messages import Facts, Gpu
from plait.nodes.place import Place
from plait.nodes.settings import LaunchSettings


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """This node's part of the launch."""

    model: str | None
    settings: LaunchSettings
    place: Place
    layout: Layout
    head_address: str
    address: str
    address_reason: str
    gpus: tuple[Gpu, ...]
    environment: Environment
    keys: NodeKeys | None
    """None: there is one node alone."""
    words: list[str]
    """The command line of this node's engine; empty if the head has the only one."""
    ports: list[tuple[str, int]]
    """Those that this node's engine opens."""

    @property
    def node(self) -> int:
        return self.place.node

    def facts(self, probe_port: int) -> Facts:
        """The facts of this node, as they are now."""
        return collect_facts(
            node=self.node,
            address=self.address,
            address_reason=self.address_reason,
            model=self.model,
            settings=self.settings,
            gpus=self.gpus,
            ports=self.ports,
            probe_port=probe_port,
        )

    def describe_nodes(self, nodes: list[int]) -> str:
        """`node 1 (ranks 2 to 3)` for each of them."""
        return ", ".join(f"node {node} ({_ranks(self.layout.ranks_of(node))})" for node in nodes)


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
