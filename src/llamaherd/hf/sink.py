"""StreamingLLM (Xiao et al. 2023): text without end in a window, the first tokens kept as attention sinks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..errors import InvalidParameterError, OutOfCellsError, PositionError, UnsupportedError
from .cache import LlamaCppCache
from .runtime import Runtime

if TYPE_CHECKING:
    from .model import LlamaCppForCausalLM

__all__ = ["SinkCache"]


class SinkCache(LlamaCppCache):
    """A cache that keeps the first tokens and the latest ones, so that generation never fills the context.

    When a row's window is full, the oldest ``shift`` tokens after the sinks go and the later ones move up
    (llama.cpp's K-shift rotates their keys; positions stay inside the window, as in the paper). Pass it as
    ``cache`` to ``generate``, forward by forward or text by text: it may be used for millions of tokens.

    Args:
        model: the model.
        window: tokens that a row holds at most, sinks included; default n_ctx.
        sinks: first tokens that are kept; default 4.
        shift: tokens that go at once; default an eighth of the window. A larger shift costs less time and
            leaves less history just after it.

    Raises:
        InvalidParameterError: sinks + shift do not fit the window, or the window does not fit n_ctx.
        UnsupportedError: this model's cache cannot be shifted.
    """

    def __init__(
        self,
        model: LlamaCppForCausalLM | Runtime,
        window: int | None = None,
        *,
        sinks: int = 4,
        shift: int | None = None,
    ) -> None:
        super().__init__(model)
        context = self.runtime.context
        self.window = context.n_ctx if window is None else window
        self.sinks = sinks
        self.shift = max(1, self.window // 8) if shift is None else shift
        if not context.memory.can_shift:
            raise UnsupportedError(
                "this model's cache cannot be shifted (recurrent state, or positions that are not rotary)"
            )
        if not 2 <= self.window <= context.n_ctx:
            raise InvalidParameterError("window", self.window, f"an integer in [2, n_ctx = {context.n_ctx}]")
        if self.sinks < 0 or self.shift < 1 or self.sinks + self.shift > self.window:
            raise InvalidParameterError(
                "shift",
                self.shift,
                f"at least 1, and with the {self.sinks} sinks at most window ({self.window})",
            )

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no end."""
        return -1

    def chunks(self, columns: int) -> Iterator[slice]:
        """Stretches of at most ``shift`` columns, for which there is always room after a shift."""
        for start in range(0, columns, self.shift):
            yield slice(start, min(start + self.shift, columns))

    def make_room(self, counts: Iterable[int]) -> None:
        """Shift the rows that would outgrow the window."""
        memory = self.runtime.context.memory
        for sequence, count in zip(self.rows.ids, counts, strict=True):
            if sequence < 0:
                continue  # it will be a fork of another row
            over = memory.length(sequence) + count - self.window
            if over > 0:
                discard = min(max(over, self.shift), memory.length(sequence) - self.sinks)
                try:
                    memory.shift(sequence, self.sinks, discard)
                except OutOfCellsError as error:
                    raise self.runtime.explain(error) from error

    def _trim(self, row: int, count: int) -> None:
        length = self.length(row)
        if count > length - self.sinks and count < int(self.mask[row].sum()):
            raise PositionError(
                length - count, f"the window holds {length} tokens of the row, {count} cannot be taken back"
            )
        super()._trim(row, count)

    def _empty_copy(self) -> SinkCache:
        return SinkCache(self.runtime, self.window, sinks=self.sinks, shift=self.shift)
