"""The training of a check model: AdamW, one cosine, contexts that grow from 1,024 to 8,192 tokens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from models import recall_tasks as tasks
from models.training.folder import save
from torch import Tensor, nn

PEAK_RATE = 2e-3
NUM_PROCESSES = 14
TOKENS_PER_STEP = 128 * 1024
NUM_AHEAD = 6
"""Batches that are being made while one is trained on."""

Parts = list[Future[tuple[Any, Any]]]


def nothing(model: nn.Module, fraction: float) -> None:
    """After a step of a model that has nothing to do then."""


def train(
    model: nn.Module,
    config: dict[str, Any],
    checkpoint: Callable[[nn.Module], dict[str, Tensor]],
    out: Path,
    seconds: float,
    after_step: Callable[[nn.Module, float], None] = nothing,
) -> None:
    """Train for so long on one GPU, then save a Hugging Face folder."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = model.cuda().train()
    optimizer = make_optimizer(model)
    compiled = torch.compile(model)
    begun, printed = time.monotonic(), 0.0
    for step, (ids_BT, weights_BT) in enumerate(batches(lambda: (time.monotonic() - begun) / seconds)):
        fraction = min(1.0, (time.monotonic() - begun) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, fraction)
        with torch.autocast("cuda", torch.bfloat16):
            loss, hits, mtp_hits = compiled(ids_BT, weights_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(model, fraction)
        if time.monotonic() - printed > 10:
            printed = time.monotonic()
            length = ids_BT.shape[1] - 2
            print(f"step {step} length {length} loss {loss:.4f} accuracy {hits:.4f} MTP {mtp_hits:.4f}", flush=True)
    save(checkpoint(model.eval()), config, out)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors do not."""
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def rate(step: int, fraction: float) -> float:
    """200 steps of warm-up, then a cosine down to 2%."""
    return PEAK_RATE * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fraction)))


def length_at(fraction: float) -> int:
    """Tokens of a row."""
    return 1024 if fraction < 0.4 else 2048 if fraction < 0.75 else 8192


def batches(progress: Callable[[], float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and weights on the GPU, until `progress` reaches 1."""
    queue, seed = deque[Parts](), 1
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        while (fraction := progress()) < 1:
            while len(queue) < NUM_AHEAD:
                queue.append(submit(pool, seed, length_at(fraction)))
                seed += 1
            made = [part.result() for part in queue.popleft()]
            ids_BT, weights_BT = (torch.cat([torch.from_numpy(part[i]) for part in made]).cuda() for i in (0, 1))
            yield ids_BT.long(), weights_BT.float()


def submit(pool: ProcessPoolExecutor, seed: int, length: int) -> Parts:
    """One batch, made by several processes."""
    num_rows = TOKENS_PER_STEP // length
    each = max(1, num_rows // NUM_PROCESSES + 1)
    firsts = range(0, num_rows, each)
    return [
        pool.submit(tasks.batch, seed * 1000 + i, min(each, num_rows - first), length) for i, first in enumerate(firsts)
    ]
