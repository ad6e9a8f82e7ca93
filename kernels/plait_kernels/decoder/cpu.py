"""A stack of dense decoder layers by the compiled CPU kernels.

Shapes: T tokens of the step, H the hidden size, D a head's width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.attention.paged_cpu import PagedRows
from plait_kernels.cpu import library as cpu
from plait_kernels.linear.cpu import PANEL, CpuMatrix


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """One layer: ``x + output(attention(qkv(norm(x))))``, then ``x + down(silu(gate) * up)`` of the norm of that."""

    attention_norm_H: Tensor
    q_norm_D: Tensor | None
    """Set if every query head is normalised before rope."""
    k_norm_D: Tensor | None
    qkv: CpuMatrix
    output: CpuMatrix
    mlp_norm_H: Tensor
    gate_up: CpuMatrix
    """Gates, then ups: a multiple of 32 each."""
    down: CpuMatrix

    def struct(self, pages: Tensor) -> cpu.Layer:
        """The layer and its pages as the kernels read them."""
        return cpu.Layer(
            qkv=self.qkv.struct,
            output=self.output.struct,
            gate_up=self.gate_up.struct,
            down=self.down.struct,
            attention_norm=self.attention_norm_H.data_ptr(),
            mlp_norm=self.mlp_norm_H.data_ptr(),
            q_norm=None if self.q_norm_D is None else self.q_norm_D.data_ptr(),
            k_norm=None if self.k_norm_D is None else self.k_norm_D.data_ptr(),
            pages=pages.data_ptr(),
        )


def can_stack(block: DenseBlock) -> bool:
    """Whether the kernel takes layers of this shape."""
    return block.gate_up.num_outputs % (2 * PANEL) == 0


class DenseStack:
    """Layers and the final norm, bound to a cache. The residual stream is float32."""

    def __init__(self, blocks: Sequence[DenseBlock], norm_H: Tensor, eps: float, pages: Sequence[Tensor]) -> None:
        """``pages`` as ``PagedRows`` takes them, one tensor a layer; all of the layers' dtype."""
        self._kept = (tuple(blocks), norm_H, tuple(pages))
        self._layers = (cpu.Layer * len(blocks))(*(block.struct(own) for block, own in zip(blocks, pages, strict=True)))
        self._struct = cpu.Decoder(
            layers=ctypes.addressof(self._layers),
            norm=norm_H.data_ptr(),
            num_layers=len(blocks),
            hidden_size=len(norm_H),
            intermediate_size=blocks[0].down.num_inputs,
            eps=eps,
        )
        self._dtype = norm_H.dtype
        for each in pages:
            cpu.check_tensor(each, self._dtype)
        self._library = cpu.library()

    def forward(self, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, rows: PagedRows) -> Tensor:
        """Hidden states after the last norm, in place of the embeddings ``x_TH``; writes keys and values.

        ``x_TH`` is contiguous and of the layers' dtype, the tables are float32. Raises ``ValueError`` otherwise.
        """
        cpu.check_tensor(x_TH, self._dtype, rows.num_tokens, self._struct.hidden_size)
        for table in (cos_T1D, sin_T1D):
            cpu.check_tensor(table, torch.float32, rows.num_tokens, 1, rows.sizes.key_dim)
        step = cpu.Activations(cos_T1D.data_ptr(), sin_T1D.data_ptr(), x_TH.data_ptr())
        self._library.plait_decoder_stack(self._struct, rows.struct, step, cpu.TYPES[self._dtype])
        return x_TH
