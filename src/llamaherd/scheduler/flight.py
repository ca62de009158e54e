"""Batches under way: one after the other, or several at once where the engine can."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import SamplingConfig
from ..engine.picks import is_memoryless
from ..engine.protocol import Batch, Engine, FloatArray, PipelinedEngine, Row
from ..errors import LlamaherdError
from .sequence import Candidate, Group

__all__ = ["Flight", "Flights"]


@dataclass(eq=False)
class Flight:
    """A batch under way.

    Attributes:
        candidates: whose tokens it computes, in its order; each appears once.
        tokens: of each of them.
        ticket: the engine's, where several are under way.
    """

    batch: Batch
    candidates: tuple[Candidate, ...]
    tokens: int
    ticket: Any = None

    def __post_init__(self) -> None:
        self._starts = [c.started for c in self.candidates]
        for candidate in self.candidates:
            candidate.ahead += self.tokens

    @property
    def groups(self) -> tuple[Group, ...]:
        """Whose requests it computes."""
        return tuple(dict.fromkeys(c.group for c in self.candidates))

    @property
    def aboard(self) -> list[Candidate]:
        """Candidates that still hold the sequence that they took off with."""
        pairs = zip(self.candidates, self._starts, strict=True)
        return [c for c, start in pairs if c.running and c.started == start]

    def rows_of(
        self, candidates: Sequence[Candidate], result: FloatArray | list[Row]
    ) -> FloatArray | list[Row]:
        """What came of these candidates; each has one row that is wanted, or none."""
        wanted = self.batch.outputs.reshape(len(self.candidates), -1)[:, -1]
        places = np.cumsum(wanted) - 1
        chosen = set(map(id, candidates))
        rows = [int(places[i]) for i, c in enumerate(self.candidates) if id(c) in chosen]
        if isinstance(result, list):
            return [result[row] for row in rows]
        return result if len(rows) == len(result) else result[rows]

    def land(self, done: bool) -> None:
        """It came back, ``done`` or with nothing."""
        for candidate in self.aboard:
            candidate.ahead -= self.tokens
            candidate.computed += self.tokens if done else 0


class Flights:
    """What is under way on an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pipelined = engine if isinstance(engine, PipelinedEngine) and engine.depth > 1 else None
        self._flights: collections.deque[Flight] = collections.deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def depth(self) -> int:
        """Batches that may be under way at once."""
        return self._pipelined.depth if self._pipelined is not None else 1

    @property
    def groups(self) -> list[Group]:
        """Whose requests are being computed; from any thread."""
        return [group for flight in list(self._flights) for group in flight.groups]

    @property
    def full(self) -> bool:
        """Whether the oldest has to land before another takes off."""
        return len(self._flights) >= self.depth

    def start(self, flight: Flight) -> None:
        """Have a batch computed. Raises as `Engine.decode` does where it cannot even begin."""
        self._flights.append(flight)
        if self._pipelined is not None:
            try:
                flight.ticket = self._pipelined.submit(flight.batch)
            except LlamaherdError:
                self._flights.remove(flight)
                flight.land(False)
                raise

    def can_draw(self, config: SamplingConfig) -> bool:
        """Whether the engine draws tokens with these settings itself."""
        return self._pipelined is not None and is_memoryless(config) and self._pipelined.can_draw(config)

    def land(self) -> tuple[Flight, FloatArray | list[Row] | LlamaherdError]:
        """The oldest flight and its rows, or what it failed with."""
        flight = self._flights[0]
        result: FloatArray | list[Row] | LlamaherdError
        try:
            if self._pipelined is not None:
                result = self._pipelined.collect(flight.ticket)
            else:
                result = self._engine.decode(flight.batch)
        except LlamaherdError as error:
            result = error
        finally:
            self._flights.popleft()
        flight.land(not isinstance(result, LlamaherdError))
        return flight, result
