"""Collectives between the GPUs of a replica, fused with what follows them.

``torch.distributed`` is what they are compared with, and what takes every call that they do not. NVLink multicast is
never used.
"""

from plait_kernels.collective.copied_all_reduce import CopiedAllReduce, row_parts
from plait_kernels.collective.expert_exchange import (
    ExchangeLimits,
    ExpertExchange,
    GatheredRows,
    SentRows,
    unsupported_exchange,
)
from plait_kernels.collective.peer_all_reduce import EMPTY, Limits, PeerAllReduce, unsupported_reason
from plait_kernels.collective.peer_memory import PeerMemory
from plait_kernels.collective.reference import add_partials_rms_norm, largest_logit

__all__ = [
    "EMPTY",
    "CopiedAllReduce",
    "ExchangeLimits",
    "ExpertExchange",
    "GatheredRows",
    "Limits",
    "PeerAllReduce",
    "PeerMemory",
    "SentRows",
    "add_partials_rms_norm",
    "largest_logit",
    "row_parts",
    "unsupported_exchange",
    "unsupported_reason",
]
