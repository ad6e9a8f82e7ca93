"""When the kernel closes a TCP connection whose other machine is silent, as options of ZeroMQ's sockets.

The engine's Rust has the same numbers (`socket_options.rs`).
"""

from __future__ import annotations

from typing import Final

KEEPALIVE_IDLE_SECONDS: Final = 1
"""Until an idle connection is probed."""
KEEPALIVE_INTERVAL_SECONDS: Final = 1
KEEPALIVE_PROBES: Final = 1
"""Unanswered probes after which the connection is closed."""
UNACKNOWLEDGED_MILLIS: Final = 2000
"""Time for which sent bytes may stay unacknowledged (`TCP_USER_TIMEOUT`). Kernels acknowledge, however busy the
processes are."""
