"""Manifold-constrained hyper-connections (mHC): several residual streams, which each part of a block reads and mixes.

Shapes: T tokens, n streams, D the hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_worker.model_config import ModelConfig, StreamsConfig
from plait_worker.weights.reader import Weights


class Mixing(NamedTuple):
    """How a part's output goes into the streams."""

    post_Tn: Tensor
    """Factor of the output in each stream."""
    comb_Tnn: Tensor
    """Doubly stochastic: old streams in rows, new ones in columns."""

    def add(self, streams_TnD: Tensor, out_TD: Tensor) -> Tensor:
        """The new streams."""
        post_Tn, comb_Tnn = self.post_Tn.to(out_TD.dtype), self.comb_Tnn.to(out_TD.dtype)
        mixed_TnD = torch.bmm(comb_Tnn.transpose(1, 2).contiguous(), streams_TnD)
        return mixed_TnD.addcmul_(post_Tn[:, :, None], out_TD[:, None])


class StreamMixer:
    """Before a part of a block: its input, a sum of the streams, and how its output is mixed into them."""

    def __init__(self, config: ModelConfig, streams: StreamsConfig, weights: Weights, name: str) -> None:
        """Read ``NAME_fn``, ``NAME_base`` and ``NAME_scale``, all float32."""
        self.streams, self.norm_eps = streams, config.norm_eps
        num = streams.num_streams
        self.widths = [num, num, num * num]
        self.fn, self.base = _read(weights, name, sum(self.widths), num * config.hidden_size)
        scale = weights.take(f"{name}_scale", (3,), dtype=torch.float32)
        self.scale = torch.cat([one.expand(width) for one, width in zip(scale, self.widths, strict=True)])

    def __call__(self, streams_TnD: Tensor) -> tuple[Tensor, Mixing]:
        """The part's input ``[T, D]``, not yet normalised."""
        mixed = torch.addcmul(self.base, _project(streams_TnD, self.fn, self.norm_eps), self.scale)
        pre_Tn, post_Tn, comb = mixed.split(self.widths, dim=1)
        x_TD = _collapse(streams_TnD, pre_Tn.sigmoid() + self.streams.eps)
        num = self.streams.num_streams
        return x_TD, Mixing(2 * post_Tn.sigmoid(), self._sinkhorn(comb.view(-1, num, num)))

    def _sinkhorn(self, comb_Tnn: Tensor) -> Tensor:
        """Rows and columns that sum to 1, as near as the iterations come; tokens lie last, which sums quickly."""
        eps = self.streams.eps
        comb_nnT = comb_Tnn.softmax(dim=-1).permute(1, 2, 0).contiguous() + eps
        comb_nnT /= comb_nnT.sum(dim=0, keepdim=True) + eps
        for _ in range(self.streams.num_iterations - 1):
            comb_nnT /= comb_nnT.sum(dim=1, keepdim=True).add_(eps)
            comb_nnT /= comb_nnT.sum(dim=0, keepdim=True).add_(eps)
        return comb_nnT.permute(2, 0, 1)


class StreamHead:
    """Behind the last block: one stream of all."""

    def __init__(self, config: ModelConfig, streams: StreamsConfig, weights: Weights) -> None:
        """Read ``hc_head_fn``, ``hc_head_base`` and ``hc_head_scale``, all float32."""
        self.eps, self.norm_eps = streams.eps, config.norm_eps
        num = streams.num_streams
        self.fn, self.base = _read(weights, "hc_head", num, num * config.hidden_size)
        self.scale = weights.take("hc_head_scale", (1,), dtype=torch.float32)

    def __call__(self, streams_TnD: Tensor) -> Tensor:
        """``[T, D]``, not yet normalised."""
        pre_Tn = torch.addcmul(self.base, _project(streams_TnD, self.fn, self.norm_eps), self.scale).sigmoid()
        return _collapse(streams_TnD, pre_Tn + self.eps)


def _read(weights: Weights, name: str, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    fn = weights.take(f"{name}_fn", (num_outputs, num_inputs), dtype=torch.float32)
    return fn, weights.take(f"{name}_base", (num_outputs,), dtype=torch.float32)


def _project(streams_TnD: Tensor, fn: Tensor, eps: float) -> Tensor:
    """All streams of a token, normalised together, times ``fn``, in float32."""
    flat = streams_TnD.flatten(1).float()
    return F.linear(flat, fn) * (flat.square().mean(dim=1, keepdim=True) + eps).rsqrt()


def _collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """The weighted sum of the streams."""
    return torch.bmm(pre_Tn[:, None], streams_TnD.float())[:, 0].to(streams_TnD.dtype)
