"""Every latent backend against float64: scattered pages, lengths around page edges, chunks, pages far into the pool."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu_driver import GPU, PAGE_SIZE, make_rows
from plait_kernels.attention import attend
from plait_worker.attention import AttentionBackend, LatentShape
from plait_worker.attention.choice import try_backend
from plait_worker.attention.found import Need, names
from plait_worker.attention.torch_latent import TorchLatentAttention
from torch import Tensor

pytestmark = pytest.mark.gpu
LATENT, SHARED, STILL, VALUE = 512, 64, 128, 128
BACKENDS = names(LatentShape, (9, 0))
EDGES = [0, 1, 62, 63, 64, 65, 127, 128, 129, 1000]
# Queries, latents, keys and weights of the softmax are bfloat16 in every backend.
TOLERANCE = 0.02
MAX_TOKENS = 8192


def shape_of(num_heads: int) -> LatentShape:
    return LatentShape(
        num_heads=num_heads,
        latent_dim=LATENT,
        cached_dim=LATENT + SHARED,
        query_dim=STILL + SHARED,
        value_dim=VALUE,
        scale=(STILL + SHARED) ** -0.5,
        dtype=torch.bfloat16,
        cached_dtype=torch.bfloat16,
    )


def backend_for(name: str, num_heads: int, context_chunk: int) -> AttentionBackend[Any]:
    shape = shape_of(num_heads)
    if name == "torch":
        return TorchLatentAttention(shape, PAGE_SIZE, context_chunk, GPU)
    outcome = try_backend(name, Need(shape, PAGE_SIZE, context_chunk, MAX_TOKENS, GPU))
    assert not isinstance(outcome, str), outcome
    return outcome


@dataclass(frozen=True)
class Heads:
    """The matrices that make keys and values from latents."""

    key_HOL: Tensor
    value_HVL: Tensor

    @classmethod
    def random(cls, num_heads: int) -> "Heads":
        sizes = ((num_heads, STILL, LATENT), (num_heads, VALUE, LATENT))
        return cls(*(torch.randn(size, device=GPU).mul(LATENT**-0.5).bfloat16() for size in sizes))

    def expand(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """In the dtype of the latents."""
        latent, shared = latent_NC.split([LATENT, SHARED], dim=1)
        keys = torch.einsum("nl,hol->nho", latent, self.key_HOL.to(latent.dtype))
        shared = shared[:, None].expand(-1, keys.shape[1], -1)
        return torch.cat((keys, shared), dim=2), torch.einsum("nl,hvl->nhv", latent, self.value_HVL.to(latent.dtype))

    def absorb(self, q: Tensor) -> Tensor:
        still, turned = q.split([STILL, SHARED], dim=2)
        return torch.cat((torch.einsum("bho,hol->bhl", still, self.key_HOL), turned), dim=2)


def error_of(
    backend: AttentionBackend[Any], num_heads: int, rows: list[tuple[int, int]], num_prefill: int, num_pages: int
) -> float:
    """Largest difference from float64 over the largest value; what no row may see is 1000."""
    torch.manual_seed(0)
    starts, lengths = [start for start, _ in rows], [length for _, length in rows]
    pool = torch.full((num_pages + 1, PAGE_SIZE, LATENT + SHARED), 1000.0, dtype=torch.bfloat16, device=GPU)
    free, contexts, tables = list(range(num_pages)), [], []
    for start, length in rows:
        cached = torch.randn(start + length, LATENT + SHARED, device=GPU).bfloat16()
        table = [free.pop() for _ in range(-(-(start + length) // PAGE_SIZE))]
        for position in range(0, start, PAGE_SIZE):
            piece = cached[position : min(position + PAGE_SIZE, start)]
            pool[table[position // PAGE_SIZE], : len(piece)] = piece
        contexts.append(cached)
        tables.append(table)
    made = make_rows(tables, num_pages, starts, [[0] * length for length in lengths], num_prefill)
    q = torch.randn(sum(lengths), num_heads, STILL + SHARED, device=GPU).bfloat16()
    heads = Heads.random(num_heads)
    new = torch.cat([cached[start:] for cached, start in zip(contexts, starts, strict=True)])
    with torch.inference_mode():
        step = backend.prepare(made)
        step.write(new, pool)
        num, out = step.num_prefill_tokens, []
        if num:
            out.append(step.prefill(q[:num], new[:num], pool, heads.expand))
        if num < len(q):
            latents = step.decode(heads.absorb(q[num:]), pool)
            out.append(torch.einsum("bhl,hvl->bhv", latents, heads.value_HVL))
    right = torch.cat(
        [
            attend(q_row, *heads.expand(cached.double()), (STILL + SHARED) ** -0.5)
            for q_row, cached in zip(q.double().split(lengths), contexts, strict=True)
        ]
    )
    return float((torch.cat(out).double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("context_chunk", [256, 4096])
@pytest.mark.parametrize("num_heads", [8, 16, 128])
@pytest.mark.parametrize("name", ["torch", *BACKENDS])
def test_rows_of_all_lengths_see_their_own_past(name: str, num_heads: int, context_chunk: int) -> None:
    backend = backend_for(name, num_heads, context_chunk)
    short = [(start, length) for start in (0, 1, 63, 64, 500) for length in (1, 63, 64, 65)]
    # Between rows with a long past stand ones with none, and ones that fill pieces of context exactly.
    long = [(0, 300), (256, 500), (0, 1), (1000, 700), (512, 1), (0, 65)]
    decode = [(start, 1) for start in EDGES]
    for rows, num_prefill in (
        (short + decode, len(short)),
        (long + decode, len(long)),
        (decode, 0),
        (short, len(short)),
        (long, len(long)),
    ):
        assert error_of(backend, num_heads, rows, num_prefill, num_pages=400) <= TOLERANCE


@pytest.mark.parametrize("name", BACKENDS)
def test_latents_whose_elements_lie_beyond_two_to_the_31_are_read(name: str) -> None:
    backend = backend_for(name, 16, 256)
    rows = [(700, 1000), (0, 65), (1000, 1), (129, 1)]
    assert error_of(backend, 16, rows, 2, num_pages=60_000) <= TOLERANCE
    assert error_of(backend, 16, rows[2:], 0, num_pages=60_000) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"latent_dim": 256, "cached_dim": 320}, "latents of 512 numbers"),
        ({"value_dim": 64}, "values of 128 numbers"),
        ({"cached_dtype": torch.float8_e4m3fn}, "pages of bfloat16"),
    ],
)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_shape_that_a_kernel_lacks_is_refused_with_its_rule(name: str, changes: dict[str, Any], rule: str) -> None:
    import dataclasses

    shape = dataclasses.replace(shape_of(16), **changes)
    assert rule in str(try_backend(name, Need(shape, PAGE_SIZE, 4096, MAX_TOKENS, GPU)))


def test_a_page_size_that_flashmla_lacks_is_refused_with_its_rule() -> None:
    assert "pages of 64 tokens" in str(try_backend("flashmla", Need(shape_of(16), 32, 4096, MAX_TOKENS, GPU)))
