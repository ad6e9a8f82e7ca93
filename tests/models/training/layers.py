"""What both check models are made of. Shapes: B rows, T tokens, E elements, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 384
EPS = 1e-6


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, EPS).to(x.dtype)


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """Without bias, weights of standard deviation 0.02."""
    layer = nn.Linear(num_inputs, num_outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def embedding(vocab: int) -> nn.Embedding:
    layer = nn.Embedding(vocab, HIDDEN)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def run_experts(x_BTE: Tensor, w1: Tensor, w2: Tensor, weight_BTX: Tensor) -> Tensor:
    """All experts on all tokens, each token's outputs summed with its weights; X experts."""
    x_NE = x_BTE.flatten(0, 1)
    gate, up = torch.einsum("td,edn->etn", x_NE, w1.to(x_BTE.dtype)).chunk(2, -1)
    hidden = F.silu(gate) * up * weight_BTX.flatten(0, 1).t().unsqueeze(-1).to(x_BTE.dtype)
    return torch.einsum("etn,end->td", hidden, w2.to(x_BTE.dtype)).view_as(x_BTE)


def angles(num_tokens: int, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's rotations, `[T, rotary_dim / 2]`."""
    angle = torch.arange(num_tokens, device=inverse.device).float()[:, None] * inverse
    return angle.cos(), angle.sin()


def loss_and_hits(logits_BTV: Tensor, target_BT: Tensor, weight_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy, and the share of an answer's tokens that have the largest logit."""
    flat = F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten(), reduction="none")
    in_answer = weight_BT > 0.5
    hits = (logits_BTV.argmax(-1) == target_BT) & in_answer
    return (flat.view_as(weight_BT) * weight_BT).sum() / weight_BT.sum(), hits.sum() / in_answer.sum()


def split_experts(name: str, weight: Tensor, width: int) -> dict[str, Tensor]:
    """A stack of experts (`...mlp.w1` or `...mlp.w2`) under the names of a checkpoint."""
    prefix = name.removesuffix("w1").removesuffix("w2") + "experts."
    if name.endswith("w2"):
        return {f"{prefix}{i}.down_proj.weight": one.t() for i, one in enumerate(weight)}
    gates = {f"{prefix}{i}.gate_proj.weight": one[:, :width].t() for i, one in enumerate(weight)}
    return gates | {f"{prefix}{i}.up_proj.weight": one[:, width:].t() for i, one in enumerate(weight)}


def stored(tensors: dict[str, Tensor], in_float32: str = "e_score") -> dict[str, Tensor]:
    """In bfloat16 on the CPU, other than the names that hold `in_float32`."""
    kept = {name: one if in_float32 in name else one.to(torch.bfloat16) for name, one in tensors.items()}
    return {name: one.contiguous().cpu().clone() for name, one in kept.items()}
