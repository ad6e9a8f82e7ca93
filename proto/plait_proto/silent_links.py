"""When the kernel closes a TCP connection whose other machine is silent, as options of ZeroMQ's sockets.

The engine's Rust has the same numbers (`socket_options.rs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SILENT_LINK_OPTIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "tcp_keepalive": 1,
        "tcp_keepalive_idle": 1,
        "tcp_keepalive_intvl": 1,
        "tcp_keepalive_cnt": 1,
        "tcp_maxrt": 2000,
    }
)
"""Names in pyzmq. An idle connection is probed after a second, and closed a second later. Sent bytes may stay
unacknowledged for so many milliseconds (`TCP_USER_TIMEOUT`): kernels acknowledge, however busy the processes are."""
