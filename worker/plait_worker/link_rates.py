"""``python -m plait_worker.link_rates DEVICE DEVICE...``: how fast each device copies to each other one.

Nothing else may run on them. The answer is a line of JSON: ``[source, target, bytes a second]`` for each pair in each
direction, by the devices' places in the command line.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence

import torch

NUM_BYTES = 256 << 20
NUM_ROUNDS = 5


def copy_rate(source: torch.device, target: torch.device, num_bytes: int = NUM_BYTES) -> float:
    """Bytes a second; the first copy, which opens the way, does not count."""
    given = torch.zeros(num_bytes, dtype=torch.uint8, device=source)
    taken = torch.empty(num_bytes, dtype=torch.uint8, device=target)
    taken.copy_(given)
    _wait(source, target)
    began = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        taken.copy_(given, non_blocking=True)
    _wait(source, target)
    return NUM_ROUNDS * num_bytes / (time.perf_counter() - began)


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def main(names: Sequence[str]) -> None:
    """Print the rates of all pairs."""
    devices = [torch.device(name) for name in names]
    pairs = itertools.permutations(range(len(devices)), 2)
    print(json.dumps([(first, second, copy_rate(devices[first], devices[second])) for first, second in pairs]))


if __name__ == "__main__":
    main(sys.argv[1:])
