"""Group-limited routing in Triton: a program takes one token.

Shapes: T tokens, E experts, K experts a token, S shared ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.moe.routing import Routing
from plait_kernels.pdl import pdl_launch, pdl_wait


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.moe.route``; float32 logits in contiguous rows."""
    num_tokens, num_experts = logits_TE.shape
    width = routing.top_k + routing.num_shared
    weights_TK = torch.empty(num_tokens, width, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty(num_tokens, width, dtype=torch.int64, device=logits_TE.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            weights_TK,
            experts_TK,
            num_experts,
            routing.scale,
            EXPERTS=triton.next_power_of_2(num_experts),
            GROUP=num_experts // routing.limit.num_groups,
            NUM_GROUPS=routing.limit.num_groups,
            GROUPS=triton.next_power_of_2(routing.limit.num_groups),
            NUM_KEPT=routing.limit.num_kept,
            TOP_K=routing.top_k,
            CHOICES=triton.next_power_of_2(width),
            WIDTH=width,
            IS_SIGMOID=routing.scoring == "sigmoid",
            HAS_BIAS=bias_E is not None,
            IS_NORMALISED=routing.normalise,
            num_warps=1,
            **pdl_launch(logits_TE),
        )
    return weights_TK, experts_TK


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    num_experts,
    scale,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_there = expert < num_experts
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=is_there, other=-float("inf"))
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if HAS_BIAS:
        choice = choice + tl.load(bias_ptr + expert, mask=is_there, other=0.0)
    # NaN has no largest: a token would choose one expert again and again, and fill the list that others have there too.
    choice = tl.where(choice == choice, choice, 1e30)
    choice = tl.where(is_there, choice, -float("inf"))
    if NUM_KEPT < NUM_GROUPS:
        group = tl.arange(0, GROUPS)
        worth = tl.full([GROUPS], -float("inf"), tl.float32)
        for index in tl.static_range(NUM_GROUPS):
            in_group = tl.where(expert // GROUP == index, choice, -float("inf"))
            best, best_expert = tl.max(in_group, axis=0, return_indices=True)
            if IS_SIGMOID:  # a group is worth its two best experts
                best += tl.max(tl.where(expert == best_expert, -float("inf"), in_group), axis=0)
            worth = tl.where(group == index, best, worth)
        is_kept = expert < 0
        for _ in tl.static_range(NUM_KEPT):
            _, chosen = tl.max(worth, axis=0, return_indices=True)
            is_kept = is_kept | (expert // GROUP == chosen)
            worth = tl.where(group == chosen, -float("inf"), worth)
        choice = tl.where(is_kept, choice, -float("inf"))
    rank = tl.arange(0, CHOICES)
    weights = tl.zeros([CHOICES], tl.float32)
    # The shared experts follow the chosen ones; their ids come after all others and their weight is 1.
    experts = num_experts + rank - TOP_K
    for index in tl.static_range(TOP_K):
        _, chosen = tl.max(choice, axis=0, return_indices=True)
        chosen = tl.minimum(tl.maximum(chosen, 0), num_experts - 1)
        weights = tl.where(rank == index, tl.sum(tl.where(expert == chosen, scores, 0.0), axis=0), weights)
        experts = tl.where(rank == index, chosen, experts)
        choice = tl.where(expert == chosen, -float("inf"), choice)
    if IS_NORMALISED:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    weights = tl.where(rank < TOP_K, weights * scale, 1.0)
    at = token * WIDTH + rank
    tl.store(weights_ptr + at, weights, mask=rank < WIDTH)
    tl.store(experts_ptr + at, experts.to(tl.int64), mask=rank < WIDTH)
