"""A transformers cache whose rows are llama.cpp sequences: it holds ids, llama.cpp keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from ..errors import OutOfCellsError, RequestError, UnsupportedError
from . import saved
from .runtime import Rows, Runtime

if TYPE_CHECKING:
    from .model import LlamaCppForCausalLM

__all__ = ["LlamaCppCache"]


class LlamaCppCache(Cache):  # type: ignore[misc]
    """A batch of llama.cpp sequences, to be passed as ``cache`` (``past_key_values``) and returned as such.

    Rows are forked, not copied, wherever transformers repeats, selects or reorders them, and when the cache
    is deep-copied. When the object is garbage-collected its sequences are free again. Masked columns
    (padding) are not in llama.cpp at all; ``mask`` remembers them.

    Args:
        model: the model whose cache it is; no other can use it.

    Attributes:
        mask: bool [batch, length], the columns that are in llama.cpp.
        rows: the sequence ids.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, model: LlamaCppForCausalLM | Runtime) -> None:
        super().__init__(layers=[])
        runtime = model if isinstance(model, Runtime) else model.runtime
        self.rows = Rows(runtime)
        self.mask = torch.zeros(0, 0, dtype=torch.bool)
        self.companions: list[LlamaCppCache] = []  # reordered with this one (the guided branch's)
        runtime.register(self)
        weakref.finalize(self, self.rows.abandon).atexit = False
        self.is_croppable = runtime.context.memory.can_trim

    # ------------------------------------------------------------------------------ queries

    @property
    def runtime(self) -> Runtime:
        """The model and context that the sequences belong to."""
        return self.rows.runtime

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows yet."""
        return bool(self.rows.ids)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first forward."""
        return len(self.rows.ids) or -1

    @property
    def is_linear(self) -> list[bool]:
        """One layer, of ordinary attention: what transformers needs to know."""
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        """llama.cpp handles sliding windows itself."""
        return [False]

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is a dummy."""
        return [False]

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return int(self.mask.shape[1])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens that all rows can hold together (n_ctx)."""
        return self.runtime.context.n_ctx

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys."""
        return self.get_seq_length() + query_length, 0

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """Tokens that each row has seen: int64 [batch]."""
        counted: NDArray[np.int64] = self.mask.numpy().sum(axis=1)
        return counted

    def length(self, row: int) -> int:
        """Tokens of a row that are in llama.cpp; its next position."""
        return self.runtime.context.memory.length(self.rows.ids[row])

    # ------------------------------------------------------------------------------- growing

    def chunks(self, columns: int) -> Iterator[slice]:
        """Stretches of new columns that are decoded one after another."""
        yield slice(0, columns)

    def make_room(self, counts: Iterable[int]) -> None:
        """Called before rows gain so many tokens each."""

    def mask_again(self, mask: NDArray[np.bool_]) -> None:
        """Take out the last tokens of rows that ``mask`` [batch, length] now leaves out.

        Raises:
            RequestError: it leaves out tokens that others follow, or wants ones that are not there.
        """
        before = self.mask.numpy()
        if np.array_equal(mask, before):
            return
        kept = mask & before
        if not np.array_equal(mask, kept) or any(
            old[np.flatnonzero(new)[-1] :].sum() != (old & ~new).sum() + 1 if new.any() else False
            for old, new in zip(before, mask, strict=True)
        ):
            raise RequestError(
                "attention_mask differs from what it was for the columns in the cache; only a row's last "
                "tokens can be masked later: crop the cache and pass the columns again"
            )
        gone = (before & ~mask).sum(axis=1).tolist()
        with self.runtime.lock:
            if not self.is_croppable and any(gone):
                raise RequestError("tokens of a recurrent model's cache cannot be masked later")
            for row, count in enumerate(gone):
                self._trim(row, count)
            self.mask = torch.from_numpy(kept)

    def take_rows(self, sources: list[int]) -> None:
        """Begin with one row for each entry; entry i is the row that row i equals, itself if it is the first.

        Rows that equal another get their sequence by share_rows(), after the other one was decoded.
        """
        self.runtime.require(len(sources))
        ids = self.runtime.allocate(sum(1 for i, source in enumerate(sources) if i == source))
        fresh = iter(ids)
        self.rows.ids = [next(fresh) if i == source else -1 for i, source in enumerate(sources)]
        self.mask = torch.zeros(len(sources), 0, dtype=torch.bool)

    def share_rows(self, sources: list[int]) -> None:
        """Fork the rows that equal others."""
        for i, source in enumerate(sources):
            if i != source:
                self.rows.ids[i] = self.runtime.fork(self.rows.ids[source])

    def drop_rows(self) -> None:
        """Release all rows now."""
        with self.runtime.lock:
            for sequence in self.rows.ids:
                if sequence >= 0:
                    self.runtime.context.memory.release(sequence)
            self.rows.ids = []
            self.mask = torch.zeros(0, 0, dtype=torch.bool)

    # ------------------------------------------------------------------- what generate() calls

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: forks, no copies."""
        self.batch_select_indices(beam_idx)
        for companion in self.companions:
            companion.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (numbers, which may repeat, or a bool mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        chosen = [int(i) for i in indices]
        if not self.is_initialized or chosen == list(range(len(self.rows.ids))):
            return
        runtime = self.runtime
        with runtime.lock:
            before = self.rows.ids
            if any(not -len(before) <= i < len(before) for i in chosen):
                raise RequestError(f"rows {chosen} of a cache that has {len(before)}")
            chosen = [i % len(before) for i in chosen]
            unused = [before[i] for i in range(len(before)) if i not in set(chosen)]
            again = len(chosen) - len(set(chosen))
            runtime.collect()
            if again > len(unused):
                runtime.require(again - len(unused))  # before anything changes
            for sequence in unused:
                runtime.context.memory.release(sequence)
            after: list[int] = []
            taken: set[int] = set()
            self.rows.ids = after
            for i in chosen:
                after.append(runtime.fork(before[i]) if i in taken else before[i])
                taken.add(i)
            self.mask = self.mask[torch.tensor(chosen, dtype=torch.long)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, neighbours equal."""
        self.batch_select_indices(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; 0 removes none.

        Raises:
            ValueError: the number is positive (as in transformers).
            UnsupportedError: the model's state is recurrent and cannot go back.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the negative number of tokens to remove, as in transformers"
            )
        columns = min(-tokens_to_remove, self.get_seq_length())
        if columns == 0:
            return
        keep = self.get_seq_length() - columns
        gone = self.mask[:, keep:].sum(1).tolist()
        memory = self.runtime.context.memory
        with self.runtime.lock:
            if not memory.can_trim and any(gone):
                raise UnsupportedError(
                    "this model's state is recurrent and cannot be cropped; deep-copy a cache before going on"
                )
            for row, count in enumerate(gone):
                self._trim(row, count)
            self.mask = self.mask[:, :keep]

    def _trim(self, row: int, count: int) -> None:
        self.runtime.context.memory.trim(self.rows.ids[row], self.length(row) - count)

    def activate_past_recording(self) -> None:
        """Nothing to do: llama.cpp keeps all that crop() needs."""

    def reset(self) -> None:
        """Empty the cache; its sequences are free again."""
        self.drop_rows()

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: llama.cpp writes keys and values itself."""
        raise UnsupportedError(
            "llama.cpp owns the keys and values; this cache cannot be given to a torch model"
        )

    # -------------------------------------------------------------------------------- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppCache:
        copy = self._empty_copy()
        memo[id(self)] = copy
        self._fork_into(copy)
        copy.companions = [companion.__deepcopy__(memo) for companion in self.companions]
        return copy

    def _empty_copy(self) -> LlamaCppCache:
        return LlamaCppCache(self.runtime)

    def _fork_into(self, copy: LlamaCppCache) -> None:
        with self.runtime.lock:
            self.runtime.require(len(self.rows.ids))
            for sequence in self.rows.ids:
                copy.rows.ids.append(self.runtime.fork(sequence))
            copy.mask = self.mask.clone()

    def __copy__(self) -> NoReturn:
        raise UnsupportedError(
            "a shallow copy would share sequence ids; use copy.deepcopy, which shares the cells"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a cache cannot be pickled; use cache.save(path) and LlamaCppCache.load(model, path)"
        )

    # ------------------------------------------------------------------------------- on disk

    def save(self, path: str | PathLike[str]) -> None:
        """Write all rows to a file, whole or not at all."""
        with self.runtime.lock:
            states = [self.runtime.context.save_sequence(sequence) for sequence in self.rows.ids]
        saved.write(path, states, self.mask.numpy())

    @classmethod
    def load(cls, model: LlamaCppForCausalLM | Runtime, path: str | PathLike[str]) -> LlamaCppCache:
        """A new cache from a file that save() wrote.

        Raises:
            StateMismatchError: it is damaged, or of another model, KV type or version.
            OutOfSequencesError, OutOfCellsError: no room.
        """
        states, mask = saved.read(path)
        cache = LlamaCppCache(model)
        runtime = cache.runtime
        with runtime.lock:
            runtime.require(len(states))
            try:
                for state in states:
                    cache.rows.ids.append(runtime.context.restore_sequence(state))
            except OutOfCellsError as error:
                cache.drop_rows()
                raise runtime.explain(error) from error
            except BaseException:
                cache.drop_rows()
                raise
        cache.mask = torch.from_numpy(mask)
        return cache

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.rows.ids)} rows x {self.get_seq_length()} columns>"
