"""A stand-in for TensorRT-LLM's Blackwell kernels: what flashinfer hands their launcher, computed plainly in torch.

flashinfer itself runs around it, with its own checks, on CPU tensors. The stand-in refuses, by `BrokenContract`, what
the launcher and the kernels of flashinfer 0.7.2.post1 would compute wrongly or write out of bounds
(csrc/trtllm_fmha_kernel_launcher.cu), and leaves garbage where they leave what was there.

Shapes: B rows, N query tokens of a row, L tokens that it sees, H query heads, G key-value heads, D numbers in a query
and key, V in a value.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = "0.7.2.post1"
MODULES = ("flashinfer.mla._core", "flashinfer.decode", "flashinfer.prefill")
CUTLASS = "flashinfer.mla._batch_mla._backends.cutlass_backend"
NUM_SMS = 148
"""Of a B200."""
LEAST_WORKSPACE = 128 << 20
QUERY_BLOCK = 256
SLIDING = 128
"""Columns of raw keys in DeepSeek-V4's lists."""
KV_TYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class BrokenContract(AssertionError):
    """A call that the kernels would answer wrongly."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise BrokenContract(what)


class Paged(NamedTuple):  # budget: the launcher's own positions
    """The positions that both paged functions begin with."""

    out: Tensor
    out_scale_factor: None
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    workspace: Tensor
    counters: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    o_sf_scale: float
    o_sf_vec_size: int
    o_sf_start_index: int
    batch_size: int
    window_left: int


class DecodeRest(NamedTuple):  # budget: the launcher's own positions
    sparse_mla_top_k: int
    sm_count: int
    enable_pdl: bool
    workspace_size: int
    attention_sinks: None
    cum_seq_lens_q: Tensor | None
    key_block_scales: None
    value_block_scales: None
    skip_softmax_threshold_scale_factor: None
    uses_shared_paged_kv_idx: bool
    lse: Tensor | None
    lse_scale: float
    lse_stride_tokens: int
    lse_stride_heads: int
    enable_block_sparse_attention: bool
    sparse_mla_top_k_lens: None
    bf16q_fp8kv_transform_mode: int
    use_fp16_softmax: None


class ContextRest(NamedTuple):  # budget: the launcher's own positions
    cum_seq_lens_q: Tensor
    cum_seq_lens_kv: Tensor
    sm_count: int
    enable_pdl: bool
    workspace_size: int
    attention_sinks: None
    key_block_scales: None
    value_block_scales: None
    skip_softmax_threshold_scale_factor: None
    uses_shared_paged_kv_idx: bool
    use_fp16_softmax: None
    uses_spcompress: None
    is_causal: bool
    lse: Tensor | None
    lse_scale: float
    lse_stride_tokens: int
    lse_stride_heads: int


class RaggedCall(NamedTuple):  # budget: the launcher's own positions
    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    workspace: Tensor
    seq_lens: Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    o_sf_scale: float
    batch_size: int
    window_left: int
    cum_seq_lens_q: Tensor
    cum_seq_lens_kv: Tensor
    sm_count: int
    enable_pdl: bool
    is_causal: bool
    workspace_size: int
    attention_sinks: None
    skip_softmax_threshold_scale_factor: None
    lse: Tensor | None
    use_fp16_softmax: None
    uses_spcompress: None
    sage_attn_sfs_q: None
    sage_attn_sfs_k: None
    sage_attn_sfs_p: None
    sage_attn_sfs_v: None
    num_elts_per_sage_attn_blk_q: int
    num_elts_per_sage_attn_blk_k: int
    num_elts_per_sage_attn_blk_p: int
    num_elts_per_sage_attn_blk_v: int


class SparseCall(NamedTuple):  # budget: the launcher's own positions
    """DeepSeek-V4's. Of its lists the first columns are raw keys, and the rest entries."""

    out: Tensor
    query: Tensor
    entries: Tensor
    raw: Tensor
    workspace: Tensor
    counters: Tensor
    sparse_indices: Tensor
    remapped_indices: Tensor
    are_storage_offsets: bool
    seq_lens: Tensor
    top_k_lens: Tensor
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    batch_size: int
    max_q_len: int
    sm_count: int
    enable_pdl: bool
    workspace_size: int
    attention_sinks: Tensor
    cum_seq_lens_q: Tensor | None
    inverse_rope: None
    output_scale: None


class Launcher:
    """The four functions and CUTLASS's, on workspaces of `least_workspace` bytes or more."""

    def __init__(self, least_workspace: int = LEAST_WORKSPACE) -> None:
        self.least_workspace = least_workspace
        self.calls: Counter[str] = Counter()
        self._known: dict[int, Tensor] = {}
        """By address; kept, so that no other tensor can come to lie there."""

    def trtllm_paged_attention_decode(self, *arguments: Any) -> None:
        call, rest = Paged(*arguments[: len(Paged._fields)]), DecodeRest(*arguments[len(Paged._fields) :])
        demand(len(arguments) == 36, "36 arguments")
        unused = (rest.sparse_mla_top_k, rest.enable_block_sparse_attention, rest.bf16q_fp8kv_transform_mode)
        demand(not any(unused), "neither sparse nor of mixed types")
        is_mla = call.key_cache.data_ptr() == call.value_cache.data_ptr()
        q_lengths = self._decode_lengths(call, rest)
        if is_mla:
            check_mla(call)
            demand(rest.cum_seq_lens_q is None or rest.lse is None, "rows of different lengths give no log-sum-exp")
        self._check_paged(call, rest.workspace_size, rest.sm_count, rest.lse)
        out = call.out.view(-1, *call.out.shape[-2:])
        self._attend_pages(call, out, q_lengths, True, rest.lse, rest.lse_scale)
        ragged = "ragged" if rest.cum_seq_lens_q is not None else "decode"
        self.calls[f"{'mla' if is_mla else 'mha'} {ragged}"] += 1

    def trtllm_paged_attention_context(self, *arguments: Any) -> None:
        call, rest = Paged(*arguments[: len(Paged._fields)]), ContextRest(*arguments[len(Paged._fields) :])
        demand(len(arguments) == 35, "35 arguments")
        q_lengths = check_ends(rest.cum_seq_lens_q, call.batch_size, call.query.shape[0], call.max_q_len)
        kv_lengths = check_ends(rest.cum_seq_lens_kv, call.batch_size, None, call.max_kv_len)
        self._check_paged(call, rest.workspace_size, rest.sm_count, rest.lse)
        demand(kv_lengths == call.seq_lens.tolist(), "cumulative lengths of the tokens seen are those of each row")
        self._attend_pages(call, call.out, q_lengths, rest.is_causal, rest.lse, rest.lse_scale)
        self.calls["mha context"] += 1

    def trtllm_ragged_attention(self, *arguments: Any) -> None:
        demand(len(arguments) == 32, "32 arguments")
        call = RaggedCall(*arguments)
        demand(call.query.dtype == call.key.dtype == call.value.dtype, "queries, keys and values of one type")
        demand(all(x.stride(-1) == 1 for x in (call.query, call.key, call.value)), "heads without gaps")
        demand(call.query.is_contiguous(), "queries without gaps")
        demand(call.window_left == -1, "no window")
        q_lengths = check_ends(call.cum_seq_lens_q, call.batch_size, call.query.shape[0], call.max_q_len)
        kv_lengths = check_ends(call.cum_seq_lens_kv, call.batch_size, call.key.shape[0], call.max_kv_len)
        check_lengths(call.seq_lens, call.batch_size)
        demand(kv_lengths == call.seq_lens.tolist(), "cumulative lengths of the tokens seen are those of each row")
        statistics = [call.max_q_len] * call.batch_size
        self._check_workspace(call.workspace, call.workspace_size, call.lse, call.query.shape[1], statistics)
        factor, out_factor = natural(call.bmm1_scale), plain(call.bmm2_scale)
        call.out.fill_(torch.nan)
        pieces = zip(
            split(call.query, q_lengths), split(call.out, q_lengths), split(call.lse, q_lengths),
            call.key.split(kv_lengths), call.value.split(kv_lengths), strict=True,
        )  # fmt: skip
        for query, out, lse, key, value in pieces:
            seen = heads_first(key), heads_first(value)
            attend(query, *seen, factor, out_factor, out, lse, 1.0, call.is_causal)
        self.calls["decompressed causal" if call.is_causal else "decompressed context"] += 1

    def trtllm_paged_attention_decode_sparse_mla_dsv4(self, *arguments: Any) -> None:
        demand(len(arguments) == 22, "22 arguments")
        call = SparseCall(*arguments)
        q_lengths = check_sparse(call)
        check_counters(call.counters, call.batch_size * call.query.shape[1], call.sm_count)
        self._check_workspace(call.workspace, call.workspace_size, None, call.query.shape[1], q_lengths)
        counters = call.counters.view(torch.int32)
        demand(not counters.any(), "counters that are zero")
        call.out.fill_(torch.nan)
        ends = zip(call.seq_lens.tolist(), q_lengths, strict=True)
        positions = [position for end, length in ends for position in range(end - length, end)]
        pools = call.raw.float().flatten(0, 2), call.entries.float().flatten(0, 2)
        for token, position in enumerate(positions):
            counters[0] += 1
            attend_sparse(call, token, min(position + 1, SLIDING), pools)
        counters.zero_()
        self.calls["sparse mla"] += 1

    def cutlass_mla_paged_attention(
        self,
        workspace: Tensor,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        kv_cache: Tensor,
        kv_len: Tensor,
        page_table: Tensor,
        o_scale: float,
    ) -> None:
        """CUTLASS's kernel: the softmax scale is built in (include/flashinfer/attention/cutlass_mla.cuh)."""
        num_rows, num_heads, _ = query.shape
        demand(lse.numel() == 0 and o_scale == 1.0, "neither a log-sum-exp nor a scale of the result")
        check_lengths(kv_len, num_rows)
        demand(page_table.is_contiguous() and page_table.shape[0] == num_rows, "a contiguous table, one row a request")
        demand(int(kv_len.max()) <= page_table.shape[1] * kv_cache.shape[1], "a table as wide as the longest row")
        partial_sums = (4 * 512 + 4) * num_heads * NUM_SMS // 2
        demand(workspace.nbytes >= partial_sums, f"{partial_sums} bytes of workspace")
        out.fill_(torch.nan)
        for row, length in enumerate(kv_len.tolist()):
            seen = heads_first(read_pages(kv_cache[:, None], page_table[row], length))
            one = slice(row, row + 1)
            attend(query[one], seen, seen[..., :512], 192**-0.5, 1.0, out[one], None, 1.0, is_causal=True)
        self.calls["mla cutlass"] += 1

    def _decode_lengths(self, call: Paged, rest: DecodeRest) -> list[int]:
        num_tokens = call.query.shape[0]
        if rest.cum_seq_lens_q is not None:
            return check_ends(rest.cum_seq_lens_q, call.batch_size, num_tokens, call.max_q_len)
        demand(num_tokens == call.batch_size * call.max_q_len, "as many query tokens in every row")
        return [call.max_q_len] * call.batch_size

    def _check_paged(self, call: Paged, workspace_size: int, sm_count: int, lse: Tensor | None) -> None:
        demand(call.query.dtype == call.key_cache.dtype == call.value_cache.dtype, "queries and pages of one type")
        demand(call.key_cache.dtype in KV_TYPES, "a type that the kernels have")
        demand(call.window_left == -1, "no window")
        table = call.block_tables
        demand(table.dtype == torch.int32 and table.is_contiguous(), "a contiguous table of int32")
        demand(table.ndim == 2 and table.shape[0] == call.batch_size, "a table with one row a request")
        check_lengths(call.seq_lens, call.batch_size)
        page_size = call.key_cache.shape[-2]
        demand(page_size in (16, 32, 64), "pages of 16, 32 or 64 tokens")
        longest = int(call.seq_lens.max())
        demand(longest <= call.max_kv_len, "no row longer than the bound")
        demand(longest <= table.shape[1] * page_size, "a table as wide as the longest row")
        demand(call.query.stride(-1) == 1 and call.key_cache.stride(-1) == 1, "heads without gaps")
        self._check_workspace(
            call.workspace, workspace_size, lse, call.query.shape[1], [call.max_q_len] * call.batch_size
        )
        check_counters(call.counters, call.batch_size * call.query.shape[1], sm_count)

    def _check_workspace(
        self, workspace: Tensor, size: int, lse: Tensor | None, num_heads: int, q_lengths: list[int]
    ) -> None:
        """Zero at first use; afterwards it holds what the kernels left there."""
        demand(workspace.is_contiguous() and workspace.nbytes == size, "the workspace's own size")
        demand(size >= self.least_workspace, f"a workspace of {self.least_workspace} bytes, not {size}")
        if lse is not None:
            needed = statistics_bytes(num_heads, q_lengths)
            demand(needed <= size, f"room for {needed} bytes of statistics in the workspace of {size}")
        if workspace.data_ptr() not in self._known:
            demand(not workspace.view(torch.int64).any(), "a workspace that is zero at its first use")
            self._known[workspace.data_ptr()] = workspace
        workspace[:4096] = 0xA5

    def _attend_pages(
        self,
        call: Paged,
        out: Tensor,
        q_lengths: list[int],
        is_causal: bool,
        lse: Tensor | None,
        lse_scale: float,
    ) -> None:
        counters = call.counters.view(torch.int32)
        demand(not counters.any(), "counters that are zero")
        factor, out_factor = natural(call.bmm1_scale), plain(call.bmm2_scale)
        out.fill_(torch.nan)
        rows = zip(split(call.query, q_lengths), split(out, q_lengths), split(lse, q_lengths), strict=True)
        for row, (query, part, part_lse) in enumerate(rows):
            counters[row] += 1
            length = int(call.seq_lens[row])
            key = heads_first(read_pages(call.key_cache, call.block_tables[row], length))
            is_mla = call.value_cache.data_ptr() == call.key_cache.data_ptr()
            value = key if is_mla else heads_first(read_pages(call.value_cache, call.block_tables[row], length))
            value = value[..., : out.shape[-1]]
            attend(query, key, value, factor, out_factor, part, part_lse, lse_scale, is_causal)
        counters.zero_()


def statistics_bytes(num_heads: int, q_lengths: list[int]) -> int:
    """What the launcher takes of the workspace for a call that returns its log-sum-exp."""
    return 8 * num_heads * len(q_lengths) * -(-max(q_lengths) // 256) * 256 + (1 << 20)


def check_mla(call: Paged) -> None:
    """What the MLA kernels are there for."""
    num_heads, widths = call.query.shape[1], (call.key_cache.shape[-1], call.out.shape[-1])
    demand(widths in ((576, 512), (320, 256)), "576 numbers in a query and 512 in the result, or 320 and 256")
    demand(num_heads <= 64 or num_heads == 128, "up to 64 heads, or 128")
    demand(call.key_cache.shape[-2] in (32, 64), "pages of 32 or 64 tokens")
    demand(call.query.dtype != torch.float16 and call.out.dtype == torch.bfloat16, "bfloat16 or float8 to bfloat16")
    demand(call.query.is_contiguous() and call.out.is_contiguous(), "queries and result without gaps")


def check_sparse(call: SparseCall) -> list[int]:
    """The rows' query tokens."""
    indices, (num_tokens, num_heads, width) = call.sparse_indices, call.query.shape
    demand(call.query.dtype == call.entries.dtype == call.raw.dtype, "queries and both caches of one type")
    demand(call.query.dtype in (torch.bfloat16, torch.float8_e4m3fn), "bfloat16 or float8")
    demand(call.out.dtype == torch.bfloat16 and call.out.shape == call.query.shape, "a result of bfloat16 a query")
    demand(call.query.is_contiguous() and num_heads in (8, 16, 32, 64, 128), "8, 16, 32, 64 or 128 heads without gaps")
    for pool in (call.entries, call.raw):
        demand(pool.ndim == 4 and pool.shape[1] == 1 and pool.shape[3] == width == 512, "pools of one head of 512")
        demand(pool.shape[0] > 0 and pool.shape[2] > 0, "pools that hold something")
        demand(pool.is_contiguous() and pool.data_ptr() % 16 == 0, "pools without gaps, at a multiple of 16 bytes")
    demand(not call.are_storage_offsets and call.remapped_indices is indices, "lists of rows")
    demand(indices.dtype == torch.int32 and indices.is_contiguous(), "contiguous lists of int32")
    demand(indices.shape[0] == num_tokens, "a list for each token")
    demand(indices.shape[1] >= SLIDING and indices.shape[1] % 4 == 0, "lists of 128 columns or more, a multiple of 4")
    check_lengths(call.seq_lens, call.batch_size)
    check_lengths(call.top_k_lens, num_tokens)
    fits = (call.top_k_lens >= SLIDING) & (call.top_k_lens <= indices.shape[1])
    demand(bool(fits.all()), "lengths that count the 128 raw keys and lie within the lists")
    sinks = call.attention_sinks
    demand(sinks.dtype == torch.float32 and sinks.shape == (num_heads,) and sinks.is_contiguous(), "a sink a head")
    demand(call.inverse_rope is None and call.output_scale is None, "no rope of the result")
    demand(call.cum_seq_lens_q is not None, "rows of any length")
    assert call.cum_seq_lens_q is not None
    lengths = check_ends(call.cum_seq_lens_q, call.batch_size, num_tokens, call.max_q_len)
    demand(
        all(end >= length for end, length in zip(call.seq_lens.tolist(), lengths, strict=True)), "rows that have begun"
    )
    return lengths


def attend_sparse(call: SparseCall, token: int, num_raw: int, pools: tuple[Tensor, Tensor]) -> None:
    """One softmax over raw keys, entries and the sinks; keys are values. Columns that are not counted are not read."""
    listed, length = call.sparse_indices[token].long(), int(call.top_k_lens[token])
    seen = []
    for pool, index in zip(pools, (listed[:num_raw], listed[SLIDING:length]), strict=True):
        demand(index.numel() == 0 or 0 <= int(index.min()) <= int(index.max()) < len(pool), "rows that there are")
        demand(index.unique().numel() == index.numel(), "each row once")
        seen.append(pool[index])
    rows_MD = torch.cat(seen)
    scores_HM = call.query[token].float() @ rows_MD.T * natural(call.bmm1_scale)
    weights = torch.cat((scores_HM, call.attention_sinks[:, None]), dim=1).softmax(dim=1)[:, :-1]
    call.out[token] = (weights @ rows_MD * plain(call.bmm2_scale)).to(call.out.dtype)


def check_lengths(lengths: Tensor, num_rows: int) -> None:
    demand(lengths.dtype == torch.int32 and lengths.is_contiguous(), "contiguous lengths of int32")
    demand(lengths.shape == (num_rows,), "one length a row")


def check_ends(ends: Tensor, num_rows: int, num_tokens: int | None, longest: int) -> list[int]:
    """The rows' lengths."""
    demand(ends.dtype == torch.int32 and ends.is_contiguous(), "contiguous cumulative lengths of int32")
    demand(ends.shape == (num_rows + 1,) and int(ends[0]) == 0, "cumulative lengths from 0, one more than rows")
    demand(num_tokens is None or int(ends[-1]) == num_tokens, "cumulative lengths that end with the tokens")
    lengths = ends.diff().tolist()
    demand(min(lengths) >= 0 and max(lengths) <= longest, f"no row longer than the bound of {longest}")
    return [int(length) for length in lengths]


def check_counters(counters: Tensor, num_slots: int, sm_count: int) -> None:
    needed = -(-max(num_slots, sm_count) // 8) * 8 * 4
    demand(counters.is_contiguous() and counters.data_ptr() % 16 == 0, "contiguous counters at a multiple of 16 bytes")
    demand(counters.nbytes >= needed, f"{needed} bytes of counters")


def natural(scale: float | Tensor) -> float:
    """The softmax's factor: a number as it is, a tensor already times log2 e."""
    return float(scale) * math.log(2) if isinstance(scale, Tensor) else scale


def plain(scale: float | Tensor) -> float:
    return float(scale)


def split(tensor: Tensor | None, lengths: list[int]) -> list[Any]:
    return [None] * len(lengths) if tensor is None else list(tensor.split(lengths))


def read_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """`[L, G, D]` of the row whose pages these are; `cache` is `[pages, G, page size, D]`."""
    num_pages = -(-length // cache.shape[2])
    used = pages[:num_pages].long()
    demand(num_pages == 0 or 0 <= int(used.min()) <= int(used.max()) < cache.shape[0], "pages that there are")
    return cache[used].transpose(1, 2).flatten(0, 1)[:length]


def attend(
    query: Tensor,
    k_GLD: Tensor,
    v_GLV: Tensor,
    factor: float,
    out_factor: float,
    out: Tensor,
    lse: Tensor | None,
    lse_scale: float,
    is_causal: bool,
) -> None:
    """Write `out` `[N, H, V]` and `lse` `[N, H]`; the last query sees all L keys, each before it one less.

    Queries that see nothing are left alone. Keys and values are float32; what is large is computed in place, for
    that is where a CPU waits for memory.
    """
    num_queries, (num_groups, num_seen, _) = query.shape[0], k_GLD.shape
    for begin in range(0, num_queries, QUERY_BLOCK):
        block = slice(begin, min(begin + QUERY_BLOCK, num_queries))
        last_N = torch.arange(block.start, block.stop) + (num_seen - num_queries if is_causal else num_seen)
        sees = slice(int((last_N < (0 if is_causal else 1)).sum()), None)
        if len(last_N[sees]) == 0:
            continue
        q_GSD = query[block][sees].float().unflatten(1, (num_groups, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        scores_GNML = (q_GSD @ k_GLD.transpose(1, 2)).mul_(factor).unflatten(1, (len(last_N[sees]), -1))
        if is_causal:
            scores_GNML.masked_fill_((torch.arange(num_seen) > last_N[sees, None])[:, None], -torch.inf)
        most = scores_GNML.amax(-1, keepdim=True)
        weights = scores_GNML.sub_(most).exp_()
        sums = weights.sum(-1, keepdim=True)
        result_GNMV = (weights.flatten(1, 2) @ v_GLV).unflatten(1, sums.shape[1:3]) * (out_factor / sums)
        out[block][sees] = result_GNMV.transpose(0, 1).flatten(1, 2).to(out.dtype)
        if lse is not None:
            base2_GNM = (sums.log() + most)[..., 0] * math.log2(math.e)
            lse[block][sees] = base2_GNM.transpose(0, 1).flatten(1) * lse_scale


def heads_first(seen: Tensor) -> Tensor:
    """`[G, L, D]` in float32, without gaps."""
    return seen.transpose(0, 1).float().contiguous()


def names(launcher: Launcher) -> dict[str, Callable[..., object]]:
    """The four names that take what a GPU would say, and the launcher's place."""
    return {
        "get_compute_capability": lambda device: (10, 0),
        "get_device_sm_count": lambda device: NUM_SMS,
        "device_support_pdl": lambda device: True,
        "get_trtllm_gen_fmha_module": lambda: launcher,
    }


def replace_launcher(launcher: Launcher, put: Callable[[Any, str, object], None] = setattr) -> None:
    """Put the four names where flashinfer looks them up, and CUTLASS's two.

    `put` may be a fixture that takes them out again.
    """
    for module in map(importlib.import_module, MODULES):
        for name, value in names(launcher).items():
            put(module, name, value)
    cutlass = importlib.import_module(CUTLASS)
    put(cutlass, "get_compute_capability", lambda device: (10, 0))
    put(cutlass, "get_mla_module", lambda: launcher)
