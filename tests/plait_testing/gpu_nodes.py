"""Nodes with a GPU each on one machine: NCCL and our own check take them for two hosts."""

from __future__ import annotations

import secrets
from pathlib import Path

from plait_testing.node_network import NodeNetwork
from plait_testing.running_server import Server

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""By this file and the host's name NCCL tells hosts apart; `_open_memory` of the ranks by the file alone."""
_ENTER = f'hostname "$0" && mount --bind "$1" {BOOT_ID} && shift && exec "$@"'


class GpuNodes(NodeNetwork):
    """Node N sees GPU N alone, and has a host name and a boot id of its own."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        """`folder` keeps the boot ids."""
        super().__init__(num_nodes)
        self._boot_ids = [folder / f"boot-id-{node}" for node in range(num_nodes)]
        for path in self._boot_ids:
            path.write_text(f"00000000-0000-0000-0000-{secrets.token_hex(6)}\n")

    def command(self, node: int, *words: str) -> list[str]:
        inside = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, f"node-{node}", str(self._boot_ids[node])]
        entered = super().command(node, *words)
        return [*entered[:4], *inside, *entered[4:]]

    def launch(self, node: int, log: Path, model: Path, *flags: str, **environment: str) -> Server:
        return super().launch(node, log, model, *flags, **{"CUDA_VISIBLE_DEVICES": str(node)} | environment)
