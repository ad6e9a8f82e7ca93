"""FP8 matmuls as they are defined, by torch alone: what the server computes that scores a run's streams again.

Weights are the engine's e4m3 numbers and scales. A row is rounded to e4m3 with a scale of its own, or one for each 128
elements where weights have blocks; a row that the engine computed by itself is not rounded, nor are two for experts.
With few rows an expert those between its two GEMMs have a scale for each 128 elements, of sums that were not rounded
before; with few rows of a dense MLP its sums are not rounded before the gate, but after it. e4m3 numbers are multiplied
as bfloat16 or float32, which hold them exactly, summed in float32, scaled, and rounded to bfloat16 once.
No FP8 GEMM, GEMV or quantising kernel of ours or of cuBLASLt takes part, so that a fault of one shows.

A last bit that differs turns some elements into the e4m3 number beside theirs, 6 to 12% away, so that two right engines
differ by far more than in bfloat16. How far is measured, not assumed: `Rounding.EITHER` rounds every matmul's result up
or down at random, by less than one last bit, as another order of sums would. What that alone does to the tokens is the
floor.

Shapes: N rows, I inputs, O outputs; T tokens, K experts a token, H the hidden size.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from plait_kernels.activation import reference as activation
from plait_kernels.linear import Fp8Matrix, Fp8Weight, Matrix, RowNorm
from plait_kernels.linear.fp8 import Fp8Rows, quantise_rows
from plait_kernels.moe.fp8_experts import Fp8Experts, has_few_rows
from plait_kernels.norm import reference as norms
from plait_kernels.rope import rotate_heads
from plait_worker.attention.backend import StepAttention
from plait_worker.attention.mha.torch_mha import TorchStep
from plait_worker.graph_sizes import DECODE_ROWS
from plait_worker.layers.norm import BlockNorm
from plait_worker.models import decoder, deepseek, fused
from plait_worker.models.block import Step
from torch import Tensor

_ENGINE_RMSNORM_MATMUL = fused.rmsnorm_matmul


class Rounding(enum.StrEnum):
    """Of a float32 matmul result to bfloat16."""

    NEAREST = "nearest"
    EITHER = "either"
    """Up or down at random, the nearer the likelier."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the steps of a pass are computed."""

    rounding: Rounding = Rounding.NEAREST
    decode_from: int | None = None
    """The position from which the engine had one row of each stream in a step; None for prompts to the end."""
    streams: int = 0
    """In such a step: one row alone is not rounded."""

    @property
    def rows(self) -> int:
        """Of the graph that such a step was run by."""
        return next((rows for rows in DECODE_ROWS if rows >= self.streams), self.streams)

    @property
    def is_indexed(self) -> bool:
        """Whether experts took its rows as they were, not rounded."""
        return self.streams > 0 and not Fp8Experts.takes_rows(self.rows)

    def has_few_rows(self, num_experts: int, top_k: int) -> bool:
        """Whether the engine went the way of few rows an expert in such a step."""
        return Fp8Experts.takes_rows(self.rows) and has_few_rows(self.rows * top_k / num_experts)

    def write(self, file: Path) -> None:
        """For servers that were started with this file."""
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(file)


def read_rules(file: Path) -> Rules:
    """Those that were written last."""
    stated = json.loads(file.read_text())
    return Rules(Rounding(stated["rounding"]), stated["decode_from"], stated["streams"])


class PlainFp8:
    """The matmuls of one step after the other."""

    def __init__(self, rules: Rules | None = None) -> None:
        """Rows are rounded until a step begins."""
        self.rules = rules or Rules()
        self.decode_N: Tensor | None = None

    def begin(self, positions_N: Tensor, rules: Rules) -> None:
        """A step with rows at these positions."""
        self.rules = rules
        self.decode_N = None if rules.decode_from is None else positions_N >= rules.decode_from

    @property
    def alone_N(self) -> Tensor | None:
        """The rows that were alone in their steps."""
        return self.decode_N if self.rules.streams == 1 else None

    def matmul(self, x_NI: Tensor, weight: Fp8Weight, *, is_grouped: bool, alone_N: Tensor | None) -> Tensor:
        """bfloat16 ``[N, O]``."""
        return self.rounded(_products(x_NI, weight, is_grouped=is_grouped, alone_N=alone_N))

    def rounded(self, out: Tensor) -> Tensor:
        """float32 to bfloat16."""
        if self.rules.rounding == Rounding.NEAREST:
            return out.bfloat16()
        noise = torch.randint_like(out, 1 << 16, dtype=torch.int32)
        return ((out.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()

    def of_matrix(self, matrix: Fp8Matrix, x_NI: Tensor) -> Tensor:
        """A matrix's rows, bias and all; raises ``ValueError`` where rows are not the step's."""
        alone_N = self.alone_N
        if alone_N is not None and len(alone_N) != len(x_NI):
            raise ValueError(f"{len(x_NI)} rows in a step of {len(alone_N)}")
        out_NO = self.matmul(x_NI, matrix.weight_OI, is_grouped=matrix.is_grouped, alone_N=alone_N)
        return out_NO if matrix.bias_O is None else out_NO + matrix.bias_O

    def gated(self, matrix: Fp8Matrix, x_NI: Tensor, *, in_gemm: bool) -> Tensor:
        """float32 ``silu(gate) * up``, ``[N, O / 2]``; ``in_gemm``: the engine's GEMM applied it to decode rows."""
        both = _products(x_NI, matrix.weight_OI, is_grouped=matrix.is_grouped, alone_N=self.alone_N)
        gated = activation.silu_mul(self.rounded(both).float())
        if self.decode_N is None or not in_gemm:
            return gated
        return torch.where(self.decode_N[:, None], self.rounded(activation.silu_mul(both)).float(), gated)

    def of_experts(
        self,
        experts: Fp8Experts,
        x_TH: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        rows: Fp8Rows | None = None,
    ) -> Tensor:
        """See ``Fp8Experts``; ``rows`` are not taken, since a kernel of the engine's made them."""
        (num_tokens, top_k), num_experts = experts_TK.shape, len(experts.down_EHI.stored_OI)
        few_N = self.decode_N if self.rules.has_few_rows(num_experts, top_k) else None
        alone_N = self.decode_N if self.rules.is_indexed else None
        parts = x_TH.new_zeros(num_tokens * top_k, x_TH.shape[1], dtype=torch.float32)
        for expert in experts_TK.unique().tolist():
            pairs = (experts_TK.flatten() == expert).nonzero()[:, 0]
            alone, few = (None if each is None else each[pairs // top_k] for each in (alone_N, few_N))
            gate_up, down = experts.gate_up_EJH.one(expert), experts.down_EHI.one(expert)
            both = _products(x_TH[pairs // top_k], gate_up, is_grouped=experts.is_grouped, alone_N=alone)
            gated = activation.silu_mul(self.rounded(both).float())
            parts[pairs] = self.matmul(gated, down, is_grouped=experts.is_grouped, alone_N=alone).float()
            if few is not None:
                of_few = self.matmul(activation.silu_mul(both), down, is_grouped=True, alone_N=None)
                parts[pairs] = torch.where(few[:, None], of_few.float(), parts[pairs])
        return torch.einsum("tkh,tk->th", parts.unflatten(0, experts_TK.shape), weights_TK.float()).to(x_TH.dtype)


def install(file: Path) -> None:
    """Let this process compute FP8 so, by the rules of a file."""
    from plait_worker.layers.rope import Rope
    from plait_worker.weights.formats import fp8_check

    # The engine does not round a lone row, but this does outside of steps.
    fp8_check.check_once = lambda *_: None  # type: ignore[attr-defined]
    plain, tables = PlainFp8(), Rope.tables

    def begin(rope: Rope, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        with suppress(FileNotFoundError):
            plain.begin(positions_T, read_rules(file))
        return tables(rope, positions_T)

    Rope.tables = begin  # type: ignore[assignment, method-assign]
    for name, made in methods(plain).items():
        setattr(Fp8Matrix, name, made)
    for owner, name, other in fused_layers():
        setattr(owner, name, other)
    Fp8Experts.__call__ = lambda experts, *given: plain.of_experts(experts, *given)  # type: ignore[method-assign]


def methods(plain: PlainFp8) -> dict[str, Callable[..., Any]]:
    """Those of ``Fp8Matrix``. A fused norm is not rounded, as in the engine, nor is a gate but for few rows."""
    engine_gates = Fp8Matrix.gates

    def normed(x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        sum_NI = norm.residual_1I + x_NI
        return norms.rms_norm(sum_NI.float(), norm.weight_I.float(), norm.eps), sum_NI

    def rmsnorm_matmul(matrix: Fp8Matrix, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        normed_NI, sum_NI = normed(x_NI, norm)
        return plain.of_matrix(matrix, normed_NI), sum_NI

    def gate_up(matrix: Fp8Matrix, x_NI: Tensor) -> Tensor:
        return plain.gated(matrix, x_NI, in_gemm=engine_gates(matrix, plain.rules.rows))

    def rmsnorm_gate_up(matrix: Fp8Matrix, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        normed_NI, sum_NI = normed(x_NI, norm)
        return gate_up(matrix, normed_NI), sum_NI

    return {
        "__call__": lambda matrix, x_NI: plain.of_matrix(matrix, x_NI),
        "matmul_out": lambda matrix, x_NI, out_NO: out_NO.copy_(plain.of_matrix(matrix, x_NI)),
        "rmsnorm_matmul": rmsnorm_matmul,
        "gates": lambda _matrix, _num_rows: True,
        "gate_up": gate_up,
        "rmsnorm_gate_up": rmsnorm_gate_up,
        "silu_mul_matmul": lambda matrix, given: plain.of_matrix(matrix, activation.silu_mul(given.float())),
    }


def fused_layers() -> Iterator[tuple[Any, str, object]]:
    """What takes whose place, so that layers that the engine fuses are computed as such beside torch's attention."""
    yield decoder, "SlotMappedStep", TorchStep
    yield fused.FusedBlock, "_attend", _attend
    yield fused, "rmsnorm_matmul", _rmsnorm_matmul
    yield deepseek, "rmsnorm_matmul", _rmsnorm_matmul


def _rmsnorm_matmul(x_ND: Tensor, residual_ND: Tensor, norm: BlockNorm, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Of a prompt's row too that is alone in a step: the engine would not round it."""
    if isinstance(matrix, Fp8Matrix):
        return matrix.rmsnorm_matmul(x_ND, RowNorm(residual_ND, norm.weight_D, norm.eps))
    return _ENGINE_RMSNORM_MATMUL(x_ND, residual_ND, norm, matrix)


def _attend(block: fused.FusedBlock, qkv_TO: Tensor, step: Step[StepAttention], pages: Tensor) -> Tensor:
    """As layers do that are not fused: torch's attention writes the cache itself."""
    qkv_THE, num_kv_heads = qkv_TO.view(qkv_TO.shape[0], -1, block.head_dim), pages.shape[2]
    qk_THE, v_TGE = qkv_THE[:, :-num_kv_heads], qkv_THE[:, -num_kv_heads:]
    q_THE, k_TGE = rotate_heads(qk_THE, block.num_heads, step.cos_T1D, step.sin_T1D, block.head_norm)
    return step.attention.forward(q_THE, k_TGE, v_TGE, pages, step.scales).flatten(1)


def _products(x_NI: Tensor, weight: Fp8Weight, *, is_grouped: bool, alone_N: Tensor | None) -> Tensor:
    """float32 ``[N, O]``."""
    rows = quantise_rows(x_NI, is_grouped=is_grouped)
    if is_grouped:
        return _where(alone_N, x_NI.float(), rows.dequantised()) @ weight.dequantised().T
    given_NI = _where(alone_N, x_NI.float(), rows.stored_NI.float())
    scale_N1 = _where(alone_N, torch.ones_like(rows.scale), rows.scale)
    return _exact_matmul(given_NI, weight.stored_OI) * scale_N1 * weight.scale


def _where(alone_N: Tensor | None, alone: Tensor, other: Tensor) -> Tensor:
    return other if alone_N is None else torch.where(alone_N[:, None], alone, other)


def _exact_matmul(x_NI: Tensor, stored_OI: Tensor) -> Tensor:
    """float32 of e4m3 numbers; on a GPU as bfloat16, which rounds the rows that are not e4m3 as the engine does."""
    if x_NI.is_cuda:
        return torch.mm(x_NI.bfloat16(), stored_OI.bfloat16().T, out_dtype=torch.float32)
    return x_NI.float() @ stored_OI.float().T
