"""One forward pass over one cache, or over two in one decode (classifier-free guidance)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.protocol import Batch, FloatArray
from ..errors import LogitsError, OutOfCellsError
from .cache import LlamaCppCache
from .packing import Bools, Columns, pack, same_rows
from .runtime import Runtime

__all__ = ["Pass", "run_passes"]

LAST = "last"
"""In ``layers``: the last hidden states after the final norm."""


@dataclass(eq=False)
class Pass:
    """What one cache is to take in, and what comes out.

    Attributes:
        cache: it gains the columns.
        columns: the new input.
        keep: bool [columns], whose logits are wanted.
        layers: whose hidden states are wanted, for all columns: -1 (what enters the first layer), 0, 1, ...
        last: whether the last hidden states after the final norm are wanted, for all columns.
        logits: float32 [batch, kept columns, n_vocab] when done; zero at padding.
        hidden: for each of ``layers`` (and LAST) float32 [batch, columns, n_embd] when done; zero at padding.
    """

    cache: LlamaCppCache
    columns: Columns
    keep: Bools
    layers: Sequence[int] = ()
    last: bool = False
    logits: torch.Tensor = field(init=False)
    hidden: dict[int | str, torch.Tensor] = field(init=False, default_factory=dict)
    sources: list[int] = field(init=False, default_factory=list)
    offset: int = field(init=False, default=0)

    @property
    def hidden_names(self) -> tuple[int | str, ...]:
        """The keys of ``hidden``, in transformers' order."""
        return (*self.layers, LAST) if self.last else tuple(self.layers)

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states are wanted at all."""
        return self.last or bool(self.layers)


def run_passes(runtime: Runtime, passes: Sequence[Pass]) -> None:
    """Decode all passes, together where their columns go in one piece. The runtime's lock is held.

    Hidden states are for a single pass.

    Raises:
        OutOfSequencesError, OutOfCellsError: no room; the caches are as before.
        LogitsError: the model's logits are NaN.
    """
    lengths = [p.cache.get_seq_length() for p in passes]
    fresh = [not p.cache.is_initialized for p in passes]
    try:
        buffer = _begin(runtime, passes, fresh)
        pieces = [list(p.cache.chunks(p.columns.shape[1])) for p in passes]
        together = len(passes) == 1 or all(one.columns.tokens is not None for one in passes)
        if together and all(len(piece) == 1 for piece in pieces):
            _decode(runtime, buffer, passes, [piece[0] for piece in pieces])
        else:
            for one, own in zip(passes, pieces, strict=True):
                for piece in own:
                    _decode(runtime, buffer, [one], [piece])
        for one in passes:
            _share(one)
    except BaseException as error:
        _undo(passes, lengths, fresh)
        if isinstance(error, OutOfCellsError) and not error.used_by:
            raise runtime.explain(error) from error
        raise


def _begin(runtime: Runtime, passes: Sequence[Pass], fresh: Sequence[bool]) -> torch.Tensor:
    """Give fresh caches their rows, and make room for all that comes out; returns all passes' logits."""
    sizes = []
    for one, new in zip(passes, fresh, strict=True):
        rows, columns = one.columns.shape
        one.sources = same_rows(one.columns) if new else list(range(rows))
        if new:
            one.cache.take_rows(one.sources)
        sizes.append(rows * int(one.keep.sum()) + 1)  # a last row takes what was computed but not asked for
        for layer in one.hidden_names:
            one.hidden[layer] = torch.zeros(rows, columns, runtime.model.n_embd)
    # everything but padding is overwritten
    make = torch.empty if all(one.columns.mask.all() for one in passes) else torch.zeros
    buffer = make(sum(sizes), runtime.context.vocabulary.n_tokens)
    one_offset = 0
    for one, size in zip(passes, sizes, strict=True):
        one.logits = buffer[one_offset : one_offset + size]
        one.offset = one_offset
        one_offset += size
    return buffer


def _decode(runtime: Runtime, buffer: torch.Tensor, passes: Sequence[Pass], pieces: Sequence[slice]) -> None:
    """Put one piece of each pass through one call of the engine."""
    batches, places, flats = [], [], []
    for one, piece in zip(passes, pieces, strict=True):
        part = one.columns.part(piece)
        one.cache.make_room(part.mask.sum(axis=1).tolist())
        keep = one.keep[piece]
        batch, flat = pack(part, one.cache, np.ones_like(keep) if one.wants_hidden else keep)
        batches.append(batch)
        flats.append(flat)
        places.append(one.offset + _logit_rows(one, piece, flat)[batch.outputs])
    joined = _join(batches)
    if len(joined):
        outputs = runtime.context.run(
            joined,
            hidden=passes[0].last,
            layers=passes[0].layers,
            into=(buffer.numpy(), np.concatenate(places)),
        )
        if passes[0].wants_hidden:
            _scatter(passes[0], pieces[0], flats[0], outputs.hidden, outputs.layers)
    for one, piece in zip(passes, pieces, strict=True):
        one.cache.mask = torch.cat([one.cache.mask, torch.from_numpy(one.columns.mask[:, piece])], 1)


def _logit_rows(one: Pass, piece: slice, flat: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each token of the piece its row in ``one.logits`` (the last, spare one if it is not kept)."""
    kept = int(one.keep.sum())
    width = piece.stop - piece.start
    if kept == width == len(one.keep):
        return flat
    row, column = flat // width, flat % width + piece.start
    order = np.cumsum(one.keep) - 1
    return np.where(one.keep[column], row * kept + order[column], len(one.logits) - 1)


def _scatter(
    one: Pass,
    piece: slice,
    flat: NDArray[np.intp],
    last: FloatArray | None,
    layers: dict[int, FloatArray],
) -> None:
    width = piece.stop - piece.start
    row, column = torch.from_numpy(flat // width), torch.from_numpy(flat % width + piece.start)
    found: dict[int | str, FloatArray] = dict(layers.items())
    if last is not None:
        found[LAST] = last
    for layer, values in found.items():
        one.hidden[layer][row, column] = torch.from_numpy(np.ascontiguousarray(values))


def _join(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(
        tokens=np.concatenate([b.tokens for b in batches if b.tokens is not None]),
        positions=np.concatenate([b.positions for b in batches]),
        sequences=np.concatenate([b.sequences for b in batches]),
        outputs=np.concatenate([b.outputs for b in batches]),
    )


def _share(one: Pass) -> None:
    """Give the rows that equal others their forks and results, and put the logits into shape."""
    rows, kept = one.columns.shape[0], int(one.keep.sum())
    one.logits = one.logits[:-1].view(rows, kept, -1)
    if one.sources != list(range(rows)):  # rows that were not decoded hold whatever the memory held
        one.cache.share_rows(one.sources)
        one.logits = one.logits[one.sources]
        one.hidden = {layer: values[one.sources] for layer, values in one.hidden.items()}
    if torch.isnan(one.logits[..., 0]).any():  # a NaN in the last hidden state reaches every logit
        raise LogitsError("NaN")


def _undo(passes: Sequence[Pass], lengths: Sequence[int], fresh: Sequence[bool]) -> None:
    for one, length, new in zip(passes, lengths, fresh, strict=True):
        if new:
            one.cache.drop_rows()
        elif one.cache.get_seq_length() > length:
            one.cache.crop(length - one.cache.get_seq_length())
