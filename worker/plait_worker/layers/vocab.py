"""Embedding and output head, sharded by vocabulary.

Shapes: T tokens, S rows that sample, D the hidden size, V the vocabulary, U its shard of one rank (the
last rank's is filled up with zeros).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from plait_kernels.linear import GpuMatrix, Matrix, dense_matrix, is_copy
from plait_kernels.sampling import NO_TOKEN, sample_greedy
from torch import Tensor

from plait_worker.parallel import Parallel
from plait_worker.weights.formats.read import A16, read_quantised
from plait_worker.weights.reader import MatrixShard, Weights


def _vocab_shard(weights: Weights, name: str, shape: tuple[int, int], parallel: Parallel) -> Tensor:
    """This rank's rows of ``[V, D]``: ``[U, D]``."""
    vocab_size, hidden_size = shape
    size = -(-vocab_size // parallel.world)
    rows = range(min(parallel.rank * size, vocab_size), min((parallel.rank + 1) * size, vocab_size))
    weight = weights.take(name, shape, rows=rows)
    return torch.cat((weight, weight.new_zeros(size - len(rows), hidden_size))) if len(rows) < size else weight


class VocabEmbedding:
    """Token ids to vectors; a rank looks up its own tokens, and the first norm adds the others'."""

    def __init__(self, weights: Weights, name: str, shape: tuple[int, int], parallel: Parallel) -> None:
        """Read ``NAME.weight`` of shape ``[V, D]``."""
        self.parallel = parallel
        self.weight_UD = _vocab_shard(weights, f"{name}.weight", shape, parallel)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """``[T, D]``, zeros for the tokens of other ranks."""
        if self.parallel.world == 1:
            return F.embedding(token_ids_T, self.weight_UD)
        size = self.weight_UD.shape[0]
        local_T = token_ids_T - self.parallel.rank * size
        own_T = (local_T >= 0) & (local_T < size)
        return F.embedding(local_T.where(own_T, 0), self.weight_UD) * own_T[:, None]


class VocabHead:
    """Hidden states to logits over the gathered vocabulary."""

    def __init__(self, multiply: Matrix, vocab_size: int, parallel: Parallel) -> None:
        """``multiply`` by a rank's shard of the matrix."""
        self.parallel = parallel
        self.vocab_size = vocab_size
        self.multiply = multiply
        self._place = parallel.peers.add_place("the greedy token")

    @classmethod
    def read(
        cls,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        parallel: Parallel,
        tied: VocabEmbedding | None = None,
    ) -> VocabHead:
        """A head with the matrix ``NAME.weight`` of shape ``[V, D]``, which may be tied to an embedding."""
        shard = MatrixShard(f"{name}.weight", shape)
        multiply = read_quantised(weights, shard, A16) if parallel.world == 1 else None
        if multiply is None:
            weight_UD = tied.weight_UD if tied else _vocab_shard(weights, f"{name}.weight", shape, parallel)
            multiply = dense_matrix(weight_UD)
            if tied and is_copy(multiply):
                weights.hold_more(f"{name}.weight", weight_UD.nbytes)
        return cls(multiply, shape[0], parallel)

    def __call__(self, hidden_SD: Tensor) -> Tensor:
        """float32 ``[S, V]``."""
        return self.whole(self.multiply.matmul_float32(hidden_SD))

    def shard(self, hidden_SD: Tensor, out_SU: Tensor | None = None) -> Tensor:
        """``[S, U]``, float32 on a CPU and the model's type on a GPU; written to ``out_SU`` if given."""
        if isinstance(self.multiply, GpuMatrix):
            return self.multiply(hidden_SD) if out_SU is None else self.multiply.matmul_out(hidden_SD, out_SU)
        logits_SU = self.multiply.matmul_float32(hidden_SD)
        return logits_SU if out_SU is None else out_SU.copy_(logits_SU)

    def whole(self, logits_SU: Tensor) -> Tensor:
        """``[S, V]``: the ranks' shards side by side, without what fills up the last rank's."""
        return self.parallel.all_gather(logits_SU)[:, : self.vocab_size]

    def own_rows(self, logits_SU: Tensor) -> Tensor:
        """``[C, V]``: the whole logits of the rows that this rank samples, filled up with zeros."""
        return self.parallel.trade_columns_for_rows(logits_SU)[:, : self.vocab_size]

    def greedy(self, logits_SU: Tensor) -> Tensor:
        """The id of each row's largest logit, the lowest of equals, int64 ``[S]``; only 8 bytes a row change hands.

        ``NO_TOKEN`` where a rank's logits hold NaN or infinity.
        """
        if self.parallel.world == 1:
            return sample_greedy(logits_SU)
        first = self.parallel.rank * logits_SU.shape[1]
        num_own = max(0, min(self.vocab_size - first, logits_SU.shape[1]))
        own_S = sample_greedy(logits_SU[:, :num_own]) if num_own else _no_ids(logits_SU)
        ids_S = self.parallel.peers.largest_logit(logits_SU, own_S, first, num_own, self._place)
        if ids_S is not None:
            return ids_S
        has_token_S, some_S = own_S != NO_TOKEN, own_S.clamp_min(0)
        largest_S = logits_SU.gather(1, some_S[:, None])[:, 0].where(has_token_S, torch.inf)
        keys_S = _order_keys(largest_S, some_S + first) if num_own else _no_ids(logits_SU) + _MIN_KEY
        key_S = self.parallel.all_max(keys_S)
        return (_MAX_ID - (key_S & _MAX_ID)).where(key_S >> 32 < _INFINITY_KEY, NO_TOKEN)


def _no_ids(logits_SU: Tensor) -> Tensor:
    """Of a rank whose shard of the vocabulary is empty."""
    return torch.zeros(len(logits_SU), dtype=torch.int64, device=logits_SU.device)


_MAX_ID = 0x7FFFFFFF
_MIN_KEY = torch.iinfo(torch.int64).min
_INFINITY_KEY = 0x7F800000


def _order_keys(logits_S: Tensor, ids_S: Tensor) -> Tensor:
    """int64 keys that order as the logits do, and equal logits by their ids, the lowest last."""
    bits_S = (logits_S.float() + 0.0).view(torch.int32)  # -0 equals 0
    ascending_S = bits_S ^ ((bits_S >> 31) & _MAX_ID)
    return (ascending_S.to(torch.int64) << 32) | (_MAX_ID - ids_S)
