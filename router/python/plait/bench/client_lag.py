"""Whether the client was late. If it was, a run's metrics are not the server's."""

from __future__ import annotations

import msgspec

from plait.bench.messages import NO_SOCKET
from plait.bench.pace import ClosedLoop
from plait.bench.percentiles import percentile
from plait.bench.run import Run

MAX_IDLE_SHARE = 0.02
"""Share of the time of a closed loop's streams that late sends may cost."""
MAX_CPU_SHARE = 0.9
"""Share of one core that a client process may use: above it the client may be the bottleneck."""


class ClientLag(msgspec.Struct, frozen=True):
    """How late the client was, in seconds: the worst of its processes."""

    lag_p99: float
    """Lag of the event loops, measured by a timer every 5 ms."""
    lag_max: float
    send_p99: float
    """From when a request could have been sent to when a process took it up."""
    send_max: float
    idle_share: float
    """Time in which requests could have been sent but were not, over the time in which they were served."""
    cpu_share: float
    num_resent: int
    reasons: tuple[str, ...]
    """Why the run is invalid; empty if it is valid."""


def client_lag(run: Run, max_lag: float) -> ClientLag:
    """The client's lag in a run; `max_lag` in seconds."""
    sends = sorted(outcome.taken - outcome.due for outcome in run.outcomes) or [0.0]
    lag_p99 = max(report.lag_p99 for report in run.reports)
    cpu_share = max(report.cpu_share for report in run.reports)
    send_p99 = max(0.0, percentile(sends, 99))
    idle_share = sum(sends) / max(1e-9, sum(outcome.freed - outcome.taken for outcome in run.outcomes))
    # A closed loop's latencies begin when a request is taken up: lag does not change them, but lowers the load.
    is_closed = isinstance(run.load.case.pace, ClosedLoop)
    late = f"it sent requests {send_p99 * 1000:.1f} ms late (p99)"
    idle = f", and its streams stood idle for {idle_share:.1%} of their time" if is_closed else ""
    found = (
        (lag_p99 > max_lag, f"its event loop was {lag_p99 * 1000:.1f} ms late (p99)"),
        (send_p99 > max_lag and (not is_closed or idle_share > MAX_IDLE_SHARE), late + idle),
        (cpu_share > MAX_CPU_SHARE, f"a client process took {cpu_share:.0%} of a core"),
        (any(one.failure == NO_SOCKET for one in run.outcomes), "it had no sockets left"),
    )
    return ClientLag(
        lag_p99=lag_p99,
        lag_max=max(report.lag_max for report in run.reports),
        send_p99=send_p99,
        send_max=max(0.0, sends[-1]),
        idle_share=idle_share,
        cpu_share=cpu_share,
        num_resent=sum(report.num_resent for report in run.reports),
        reasons=tuple(reason for is_late, reason in found if is_late),
    )
