"""How the compiled kernels and torch share a CPU's cores."""

from __future__ import annotations

import logging
from typing import Any

import torch
from plait_kernels.cpu.library import supports_tensors
from plait_kernels.moe.cpu import ExpertPanels

from plait_worker.attention.model_attention import ModelAttention
from plait_worker.layers.mlp import SparseMlp
from plait_worker.models.decoder import Decoder, MhaDecoder
from plait_worker.models.model import Model

_log = logging.getLogger(__name__)


def limit_torch_threads(model: Model[Any], attention: ModelAttention) -> None:
    """Limit torch to one thread if the compiled kernels do all the heavy work: idle torch threads spin on the cores."""
    left = torch_work(model, attention)
    if not left:
        torch.set_num_threads(1)
    else:
        _log.info("left to torch: %s, on %d threads", ", ".join(left), torch.get_num_threads())
    is_one_call = isinstance(model, MhaDecoder) and model.stack is not None and len(attention.backends) == 1
    if is_one_call and not attention.uses_torch:
        _log.info("the decoder's layers run as one compiled call a step")


def torch_work(model: Model[Any], attention: ModelAttention) -> list[str]:
    """The heavy work of a step that the compiled kernels do not take."""
    dtype = str(model.dtype).removeprefix("torch.")
    left = [] if supports_tensors(torch.empty(0, dtype=model.dtype)) else [f"GEMMs in {dtype}"]
    if attention.uses_torch:
        left.append("attention")
    if isinstance(model, Decoder) and not all(map(_is_compiled, _sparse_mlps(model))):
        left.append("experts")
    return left


def _sparse_mlps(model: Decoder[Any]) -> list[SparseMlp]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, SparseMlp)]


def _is_compiled(mlp: SparseMlp) -> bool:
    return isinstance(mlp.experts, ExpertPanels)
