"""Train recall-mla: DeepSeek-V3's architecture, small (MLA, grouped routing, YaRN, one MTP layer).

    python tests/models/training/train_mla.py FOLDER SECONDS

The head sizes are the real ones: 512 of the compressed KV, 64 rotated, 128 not rotated, values of 128. Tensors have
DeepSeek-V3's own names.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from models import recall_tasks as tasks
from models.training.layers import (
    HIDDEN,
    Norm,
    angles,
    embedding,
    linear,
    loss_and_hits,
    run_experts,
    split_experts,
    stored,
)
from models.training.loop import train
from torch import Tensor, nn

HEADS, NOPE, ROPE, VALUE, KV_RANK, Q_RANK = 8, 128, 64, 128, 512, 192
EXPERTS, TOP, GROUPS, TOP_GROUPS, WIDTH = 8, 2, 4, 2, 192
NUM_LAYERS, DENSE_WIDTH, SCALING = 4, 1024, 1.5
THETA, FACTOR, ORIGINAL = 10000.0, 4.0, 2048
MTP = f"model.layers.{NUM_LAYERS}."

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": tasks.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE_WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "routed_scaling_factor": SCALING,
    "n_group": GROUPS,
    "topk_group": TOP_GROUPS,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": KV_RANK,
    "q_lora_rank": Q_RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_scaling": {
        "type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": tasks.BOS,
    "eos_token_id": tasks.EOS,
    "pad_token_id": tasks.PAD,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def yarn() -> tuple[Tensor, float]:
    """Inverse frequencies, and the scale of the scores."""
    inverse = THETA ** (-torch.arange(0, ROPE, 2).double() / ROPE)

    def dim_of(rotations: int) -> float:
        return ROPE * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(dim_of(32)), 0), min(math.ceil(dim_of(1)), ROPE - 1)
    ramp = ((torch.arange(ROPE // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
    mscale = 0.1 * math.log(FACTOR) + 1.0
    return (inverse / FACTOR * ramp + inverse * (1 - ramp)).float(), (NOPE + ROPE) ** -0.5 * mscale * mscale


INVERSE, SCALE = yarn()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[B, T, heads, 64]`; neighbouring pairs rotate together."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """MLA without weight absorption: keys and values of every head are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = linear(HIDDEN, Q_RANK), Norm(Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(HIDDEN, KV_RANK + ROPE), Norm(KV_RANK)
        self.kv_b_proj, self.o_proj = linear(KV_RANK, HEADS * (NOPE + VALUE)), linear(HEADS * VALUE, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(B, T, HEADS, NOPE + ROPE)
        q_nope, q_rope = q.split((NOPE, ROPE), -1)
        compressed, k_rope = self.kv_a_proj_with_mqa(x).split((KV_RANK, ROPE), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(B, T, HEADS, NOPE + VALUE)
        k_nope, v = kv.split((NOPE, VALUE), -1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).expand(B, T, HEADS, ROPE)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        v = F.pad(v, (0, ROPE)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)[..., :VALUE]
        attended: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, T, HEADS * VALUE))
        return attended


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(HIDDEN, width),
            linear(HIDDEN, width),
            linear(width, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Moe(nn.Module):
    """Sigmoid scores with a correction bias, the best groups, the best experts of them, and one shared expert."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(HIDDEN, EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH) * 0.02)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.02)
        self.shared_experts = Mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.route(torch.sigmoid(F.linear(x.float(), self.gate.weight.float())))
        shared: Tensor = self.shared_experts(x)
        return run_experts(x, self.w1, self.w2, weight) + shared

    def route(self, score: Tensor) -> Tensor:
        """Each token's weight for each expert; zero for those that it does not go to."""
        corrected = score + self.bias
        best = corrected.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1)
        in_group = torch.zeros_like(best).scatter_(-1, best.topk(TOP_GROUPS, -1).indices, 1)
        corrected = corrected.masked_fill(in_group.repeat_interleave(EXPERTS // GROUPS, -1) == 0, 0.0)
        chosen = torch.zeros_like(score).scatter_(-1, corrected.topk(TOP, -1).indices, 1.0)
        if self.training:
            with torch.no_grad():
                self.load += chosen.flatten(0, -2).mean(0)
        weight = score * chosen
        return weight / (weight.sum(-1, keepdim=True) + 1e-20) * SCALING


class Block(nn.Module):
    """Attention, then the dense MLP or the experts."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn, self.mlp = Attention(), Mlp(DENSE_WIDTH) if dense else Moe()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    """Returns the loss, the accuracy on answers, and that of the MTP layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = embedding(tasks.VOCAB)
        self.layers = nn.ModuleList(Block(dense=i < 1) for i in range(NUM_LAYERS))
        self.norm, self.head = Norm(HIDDEN), linear(HIDDEN, tasks.VOCAB)
        self.enorm, self.hnorm, self.eh_proj = Norm(HIDDEN), Norm(HIDDEN), linear(2 * HIDDEN, HIDDEN)
        self.mtp, self.mtp_norm = Block(dense=False), Norm(HIDDEN)

    def forward(self, ids_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and weights hold two tokens more than are read: the targets of the model and of its MTP layer."""
        now, after, last = ids_BT[:, :-2], ids_BT[:, 1:-1], ids_BT[:, 2:]
        cos, sin = angles(now.shape[1], INVERSE.to(now.device))
        x = self.embed(now).to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        loss, hits = loss_and_hits(self.head(x).float(), after, weights_BT[:, 1:-1])
        both = torch.cat((self.enorm(self.embed(after).to(x.dtype)), self.hnorm(x)), -1)
        mtp = self.mtp_norm(self.mtp(self.eh_proj(both), cos, sin))
        mtp_loss, mtp_hits = loss_and_hits(self.head(mtp).float(), last, weights_BT[:, 2:])
        return loss + 0.3 * mtp_loss, hits, mtp_hits


def balance(model: nn.Module, fraction: float) -> None:
    """Move each expert's correction bias against its load, less towards the end of the training."""
    for moe in model.modules():
        if isinstance(moe, Moe):
            moe.bias += 0.001 * torch.sign(moe.load.mean() - moe.load) * (1 - fraction)
            moe.load.zero_()


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The tensors under DeepSeek-V3's names."""
    state, named = model.state_dict(), dict[str, Tensor]()
    for name, weight in state.items():
        if name.startswith("layers."):
            named |= block_tensors("model." + name, weight)
        elif name.startswith("mtp."):
            named |= block_tensors(MTP + name.removeprefix("mtp."), weight)
    head, embed = state["head.weight"], state["embed.weight"]
    named |= {"model.embed_tokens.weight": embed, "model.norm.weight": state["norm.weight"], "lm_head.weight": head}
    named |= {f"{MTP}{name}.weight": state[f"{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
    named |= {f"{MTP}shared_head.norm.weight": state["mtp_norm.weight"], f"{MTP}shared_head.head.weight": head}
    return stored(named | {f"{MTP}embed_tokens.weight": embed})


def block_tensors(name: str, weight: Tensor) -> dict[str, Tensor]:
    """One tensor of a block, or one of each expert."""
    if name.endswith("mlp.bias"):
        return {name.removesuffix("bias") + "gate.e_score_correction_bias": weight.float()}
    if name.endswith("mlp.load"):
        return {}
    if name.endswith(("mlp.w1", "mlp.w2")):
        return split_experts(name, weight, WIDTH)
    return {name: weight}


if __name__ == "__main__":
    train(Model(), CONFIG, checkpoint, Path(sys.argv[1]), float(sys.argv[2]), after_step=balance)
