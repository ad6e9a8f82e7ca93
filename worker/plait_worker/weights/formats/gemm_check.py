"""Self-checks of GEMMs with quantised weights: a few are compared with what their weights stand for.

Shapes: N rows, I inputs, O outputs; of experts H the hidden size, J twice an expert's width, K a row's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from plait_kernels.moe import Experts
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.errors import WorkerError

OUTPUTS = 256
"""Of a matrix that are compared."""
MAX_ERROR = 0.03
"""Over the largest output: several times what rounding to bfloat16 gives."""
_checked: set[tuple[object, ...]] = set()


def check_once(
    form: tuple[object, ...],
    gemms: str,
    rows: Sequence[int],
    error_of: Callable[[int], float],
    advice: str,
    max_error: float = MAX_ERROR,
) -> None:
    """Once for each form, with so many rows. Raises ``WorkerError`` if a GEMM is wrong on this GPU."""
    if form in _checked:
        return
    _checked.add(form)
    for num_rows in rows:
        if not (off_by := error_of(num_rows)) <= max_error:
            raise WorkerError(
                ExitCode.HARDWARE,
                f"GEMMs of {gemms} are wrong on this GPU: {num_rows} rows are off by {off_by:.2g} of the largest "
                f"output; serve the model with {advice}, and report this",
            )


def random_rows(num_rows: int, num_inputs: int, device: torch.device) -> Tensor:
    """bfloat16, the same each time."""
    drawn = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=drawn, device=device).bfloat16()


def error(given: Tensor, right: Tensor) -> float:
    """Largest difference over the largest output; NaN if an output is. Zeros are to give zeros."""
    least = torch.finfo(torch.float32).tiny
    return float((given.float() - right).abs().max() / right.abs().max().clamp(min=least))


def experts_error(
    experts: Experts,
    x_NH: Tensor,
    chosen: Iterable[tuple[int, Tensor, Tensor]],
    rounded: Callable[[Tensor], Tensor] = lambda value: value,
) -> float:
    """Of these experts, which weigh alike: each one's id, float32 ``[J, H]`` and ``[H, I]``.

    What they are multiplied by is ``rounded`` before; what gate and up give is bfloat16, as kernels write it
    that do not gate it themselves.
    """
    ids, right_NH = [], torch.zeros_like(x_NH, dtype=torch.float32)
    for expert, gate_up_JH, down_HI in chosen:
        gate_NI, up_NI = (rounded(x_NH.float()) @ gate_up_JH.T).bfloat16().float().chunk(2, dim=1)
        right_NH += rounded(F.silu(gate_NI) * up_NI) @ down_HI.T
        ids.append(expert)
    ids_NK = torch.tensor(ids, device=x_NH.device).repeat(len(x_NH), 1)
    return error(experts(x_NH, torch.ones_like(ids_NK, dtype=torch.float32), ids_NK), right_NH)
