"""Models with random weights, by transformers."""

from __future__ import annotations

import torch
import transformers


def random_model(config: transformers.PretrainedConfig, seed: int) -> transformers.PreTrainedModel:
    """In float32; norms and biases are random too, since ones and zeros hide mistakes."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(buffer, -0.5, 0.5)
    return model
