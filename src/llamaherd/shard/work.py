"""What travels down a chain of stages: operations on sequences, then a batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.protocol import Batch, Draw, FloatArray, IntArray, Row
from ..errors import (
    LlamaherdError,
    OutOfCellsError,
    PositionError,
    RequestError,
    SequenceError,
    StageLostError,
)
from .stage import Stage, StageFacts

__all__ = ["Chain", "Done", "Operation", "StageWork", "Work", "perform"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the sequences.

    Attributes:
        kind: ``"allocate"`` sequence; ``"release"`` it; ``"fork"`` it from the first ``length`` tokens of
            ``source``; ``"trim"`` it to at most ``length`` tokens.
    """

    kind: str
    sequence: int
    source: int = -1
    length: int = 0


@dataclass(frozen=True, eq=False)
class Work:
    """A step of a whole chain.

    Attributes:
        operations: carried out first.
        batch: computed then; none if there is nothing to compute.
    """

    operations: tuple[Operation, ...]
    batch: Batch | None


@dataclass(frozen=True, eq=False)
class Done:
    """What came of a step.

    Attributes:
        rows: of the batch: logits, float32 [n wanted, n_vocab]; if it has draws, a row for each wanted token.
        error: of the stage that failed first, in place of rows; the operations were carried out.
        seconds: that each stage computed.
    """

    rows: FloatArray | list[Row] | None = None
    error: LlamaherdError | None = None
    seconds: tuple[float, ...] = field(default=())


@dataclass(frozen=True, eq=False)
class StageWork:
    """A step as one stage gets it: ``inputs`` are token ids or hidden states, or None to compute nothing.

    ``draws`` are for the last stage.
    """

    operations: tuple[Operation, ...]
    inputs: IntArray | FloatArray | None
    positions: IntArray
    sequences: IntArray
    outputs: NDArray[np.bool_]
    draws: tuple[Draw | None, ...] | None = None

    @classmethod
    def of(cls, work: Work, inputs: IntArray | FloatArray | None) -> StageWork:
        """A step with the inputs of one stage."""
        batch = work.batch
        if batch is None:
            none = np.empty(0, np.int32)
            return cls(work.operations, None, none, none, none.astype(np.bool_))
        return cls(work.operations, inputs, batch.positions, batch.sequences, batch.outputs, batch.draws)

    def operations_only(self) -> StageWork:
        """The step without its batch."""
        return dataclasses.replace(self, inputs=None)


class Chain(Protocol):
    """Stages behind one another. Steps are computed and come back in the order in which they are sent."""

    @property
    def facts(self) -> tuple[StageFacts, ...]:
        """Of each stage, in order."""

    @property
    def depth(self) -> int:
        """Steps that can be under way at once so that every stage works."""

    def send(self, work: Work) -> None:
        """Begin a step. Raises StageLostError."""

    def receive(self) -> Done:
        """The result of the oldest step that has not been received. Raises StageLostError."""

    def restore(self) -> None:
        """After a StageLostError: replace what was lost and empty all sequences; steps under way are gone.

        Raises WorkerError if that cannot be done.
        """

    def rebalance(self) -> bool:
        """Divide the layers anew where that is possible; whether anything changed, and restore() comes next.

        Raises CapacityError, WorkerError: nothing was changed.
        """

    def abort(self) -> None:
        """Have the steps under way end with DecodeAbortedError, as soon as may be; from any thread."""

    def close(self) -> None:
        """Free everything; idempotent."""


def perform(stage: Stage, work: StageWork) -> FloatArray | list[Row] | None:
    """Carry out a step on one stage; its output, if there is a batch: see `Stage.forward` and `Stage.draw`.

    Raises what `Stage.forward` does, and StageLostError where operations or batch do not fit the stage's
    sequences: the head has checked them, so the stage is not where the head believes it to be.
    """
    for operation in work.operations:
        try:
            _operate(stage, operation)
        except (LlamaherdError, ValueError) as error:
            raise StageLostError(-1, f"{operation} does not fit its sequences: {error}") from error
    if work.inputs is None:
        return None
    try:
        output = stage.forward(work.inputs, work.positions, work.sequences, work.outputs)
    except (PositionError, SequenceError, OutOfCellsError) as error:
        raise StageLostError(-1, f"a batch does not fit its sequences: {error}") from error
    if not stage.last or work.draws is None:
        return output
    wanted = [draw for draw, want in zip(work.draws, work.outputs, strict=True) if want]
    return stage.draw(output, wanted)


def _operate(stage: Stage, operation: Operation) -> None:
    memory, sequence = stage.memory, operation.sequence
    if operation.kind == "allocate":
        memory.allocate(sequence)
    elif operation.kind == "release":
        memory.release(sequence)
    elif operation.kind == "trim":
        stage.trim(sequence, operation.length)
    elif operation.kind == "fork":
        memory.fork(operation.source, operation.length, sequence)
    else:
        raise RequestError(f"{operation.kind!r} is no operation")
