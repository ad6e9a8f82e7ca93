"""Train recall-gqa: Qwen3-MoE's architecture, small (GQA with q/k norm, softmax top 2 of 8 experts).

python tests/models/training/train_gqa.py FOLDER SECONDS
"""

from __future__ import annotations

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

HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP, WIDTH, NUM_LAYERS = 8, 2, 128, 8, 2, 192, 4
THETA = 100000.0

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": tasks.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 768,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": THETA,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": tasks.BOS,
    "eos_token_id": tasks.EOS,
    "pad_token_id": tasks.PAD,
    "torch_dtype": "bfloat16",
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[B, T, heads, 128]`; the two halves rotate together."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


class Attention(nn.Module):
    """GQA; queries and keys are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM), linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, T, HEADS, HEAD_DIM)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, KV_HEADS, HEAD_DIM)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(B, T, KV_HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, T, HEADS * HEAD_DIM))
        return attended


class Moe(nn.Module):
    """Softmax over the experts, the best of them with weights that sum to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(HIDDEN, EXPERTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH) * 0.02)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' output, and the loss that balances them."""
        share = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
        chosen = torch.zeros_like(share).scatter_(-1, share.topk(TOP, -1).indices, 1.0)
        weight = share * chosen
        weight = weight / weight.sum(-1, keepdim=True)
        unbalanced = EXPERTS * (chosen.flatten(0, -2).mean(0) / TOP * share.flatten(0, -2).mean(0)).sum()
        return run_experts(x, self.w1, self.w2, weight), unbalanced


class Block(nn.Module):
    """Attention, then the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn, self.mlp = Attention(), Moe()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, unbalanced = self.mlp(self.post_attention_layernorm(x))
        return x + out, unbalanced


class Model(nn.Module):
    """Returns the loss, the accuracy on answers, and 0 for the MTP layer that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = embedding(tasks.VOCAB)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = Norm(HIDDEN), linear(HIDDEN, tasks.VOCAB)

    def forward(self, ids_BT: Tensor, weights_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and weights hold two tokens more than are read; the last is for MTP layers."""
        now, after = ids_BT[:, :-2], ids_BT[:, 1:-1]
        inverse = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=now.device).float() / HEAD_DIM)
        cos, sin = angles(now.shape[1], inverse)
        x, unbalanced = self.embed(now).to(torch.bfloat16), torch.zeros((), device=now.device)
        for layer in self.layers:
            x, of_layer = layer(x, cos, sin)
            unbalanced = unbalanced + of_layer
        loss, hits = loss_and_hits(self.head(self.norm(x)).float(), after, weights_BT[:, 1:-1])
        return loss + 0.01 * unbalanced, hits, torch.zeros((), device=now.device)


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The tensors under Qwen3-MoE's names."""
    named = dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        if name.endswith(("mlp.w1", "mlp.w2")):
            named |= split_experts("model." + name, weight, WIDTH)
        else:
            renamed = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
            named[renamed.get(name, "model." + name)] = weight
    return stored(named)


if __name__ == "__main__":
    train(Model(), CONFIG, checkpoint, Path(sys.argv[1]), float(sys.argv[2]))
