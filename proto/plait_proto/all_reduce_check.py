"""What a launcher and its check of the network between nodes say to each other, each message a line of JSON."""

from __future__ import annotations

import msgspec

from plait_proto.messages import StoreReply, StoreRequest

ASKED = "asked "
"""A `StoreRequest` follows; the launcher writes a `StoreReply` to standard input."""
DONE = "done "
"""A `Reduced` follows."""


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """How an all-reduce between the nodes went, as one of them sees it."""

    problem: str = ""
    """Why it did not get through; empty if it did."""
    backend: str = ""
    """gloo or nccl."""
    num_bytes: int = 0
    """Of the tensor."""
    seconds: float = 0.0
    """Of one all-reduce, the median."""


encode_line = msgspec.json.encode
decode_request = msgspec.json.Decoder(StoreRequest).decode
decode_reply = msgspec.json.Decoder(StoreReply).decode
decode_reduced = msgspec.json.Decoder(Reduced).decode
"""Each raises one of `UNDECODABLE` for anything else."""
