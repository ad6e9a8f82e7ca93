"""Mixture of experts by the compiled CPU kernels. Shapes as in ``plait_kernels.moe.reference``; J = 2 I."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import starmap

import torch
from torch import Tensor

from plait_kernels.cpu import library as cpu
from plait_kernels.linear.cpu import PANEL, CpuMatrix, PanelMatrix, can_pack


class ExpertPanels:
    """Copies of all experts' matrices in the order in which the kernels read them.

    Sums are float32; an expert's result is not rounded before it is added. Results do not depend on the batch.
    """

    def __init__(self, experts: Iterable[tuple[CpuMatrix, CpuMatrix]]) -> None:
        """An expert's ``[J, H]``, gate rows first, and ``[H, I]`` each: all dense, or all of GGUF blocks."""
        pairs = list(experts)
        self._num_experts = len(pairs)
        self._matrices = tuple(zip(*pairs, strict=True))
        self._arrays = [(cpu.Matrix * len(each))(*(matrix.struct for matrix in each)) for each in self._matrices]
        self._struct = cpu.Experts(*(ctypes.addressof(array) for array in self._arrays), len(pairs))
        self._dtype, self._hidden_size = pairs[0][0].dtype, pairs[0][0].num_inputs
        self._library = cpu.library()

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts, ``[T, H]`` in the dtype of ``x``, which is the matrices'.

        ``weights_TK`` is float32. Raises ``ValueError`` if a tensor is of another dtype or width.
        """
        cpu.check_tensor(x_TH, self._dtype, self._hidden_size)
        cpu.check_tensor(weights_TK, torch.float32, *experts_TK.shape)
        x_TH, weights_TK = x_TH.contiguous(), weights_TK.contiguous()
        order_N = experts_TK.flatten().argsort(stable=True)
        ends_E = experts_TK.flatten().bincount(minlength=self._num_experts).cumsum(0)
        pairs = cpu.Pairs(order_N.data_ptr(), ends_E.data_ptr(), weights_TK.data_ptr(), *experts_TK.shape)
        out_TH = torch.empty_like(x_TH)
        self._library.plait_moe(self._struct, pairs, x_TH.data_ptr(), cpu.TYPES[self._dtype], out_TH.data_ptr())
        return out_TH


def dense_experts(experts: Iterable[tuple[Tensor, Tensor]]) -> ExpertPanels:
    """Of ``[J, H]`` and ``[H, I]`` each, as ``can_pack_experts`` takes them.

    Each is copied before the next is asked for.
    """
    return ExpertPanels(starmap(_repack_expert, experts))


def _repack_expert(gate_up_JH: Tensor, down_HI: Tensor) -> tuple[PanelMatrix, PanelMatrix]:
    return PanelMatrix(gate_up_JH, None), PanelMatrix(down_HI, None)


def can_pack_experts(gate_up_JH: Tensor, down_HI: Tensor) -> bool:
    """Whether the kernels are there and take experts of this shape and type."""
    return can_pack(gate_up_JH) and can_pack(down_HI) and gate_up_JH.shape[0] % (2 * PANEL) == 0
