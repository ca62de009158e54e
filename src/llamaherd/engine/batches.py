"""What a batch must be like before libllama sees it."""

from __future__ import annotations

import numpy as np

from ..errors import OutOfCellsError, PositionError, RequestError, TokenError
from .protocol import Batch, SequenceMemory

__all__ = ["check_batch"]


def check_batch(
    batch: Batch, memory: SequenceMemory, *, n_ctx: int, n_vocab: int, n_embd: int
) -> dict[int, int]:
    """Refuse what would make libllama abort or misbehave; the tokens that each sequence gains.

    Raises:
        RequestError: no tokens, or arrays that do not fit together.
        TokenError, PositionError, SequenceError, OutOfCellsError: a token is not of the vocabulary; a
            position does not continue its sequence, or is beyond ``n_ctx``; a sequence is not in use; no
            room.
    """
    n = len(batch)
    given = batch.tokens if batch.tokens is not None else batch.embeddings
    if n == 0 or given is None or (batch.tokens is not None and batch.embeddings is not None):
        raise RequestError("a batch holds at least one token, as either tokens or embeddings")
    if not len(given) == len(batch.sequences) == len(batch.outputs) == n:
        raise RequestError(
            f"a batch's arrays are equally long, not {len(given)}, {n} positions, "
            f"{len(batch.sequences)} sequences and {len(batch.outputs)} outputs"
        )
    if batch.tokens is not None:
        bad = np.flatnonzero((batch.tokens < 0) | (batch.tokens >= n_vocab))
        if len(bad):
            raise TokenError(int(batch.tokens[bad[0]]), n_vocab, int(bad[0]))
    elif given.shape != (n, n_embd):
        raise RequestError(f"embeddings have the shape ({n}, {n_embd}), not {given.shape}")
    appended: dict[int, int] = {}
    for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
        count = appended.get(sequence, 0)
        expected = memory.length(sequence) + count
        if position != expected:
            raise PositionError(position, f"the sequence goes on at {expected}", sequence)
        if position >= n_ctx:
            raise PositionError(position, f"n_ctx is {n_ctx}", sequence)
        appended[sequence] = count + 1
    if n > memory.free_cells:
        raise OutOfCellsError(n, memory.n_cells - memory.free_cells, memory.n_cells)
    return appended
