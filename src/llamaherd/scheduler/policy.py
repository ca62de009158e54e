"""What to do next: pure functions over small views, tested without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Running", "StepPlan", "Waiting", "next_waiting", "plan_step"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request with candidates that have not started.

    Attributes:
        key: names it.
        client: whose it is.
        arrival: order of submission.
        running: its candidates that run now.
        slots: sequences that its next start takes (beams start together).
    """

    key: int
    client: str
    arrival: int
    running: int = 0
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Running:
    """A candidate with a sequence.

    Attributes:
        key: names it.
        computed: tokens in the KV cache.
        pending: tokens of the prompt not yet computed, while it prefills.
        started: order of starting.
        served: the step at which it last computed.
        paused: its reader is too slow.
        prefilling: its pending tokens belong to the prompt, whatever their number.
    """

    key: int
    computed: int
    pending: int
    started: int
    served: int = 0
    paused: bool = False
    prefilling: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: these candidates decode a token each; this one prefills tokens [start, end)."""

    decode: tuple[int, ...]
    prefill: int | None = None
    start: int = 0
    end: int = 0

    @property
    def cells(self) -> int:
        """KV cells that the step needs."""
        return len(self.decode) + self.end - self.start


def next_waiting(
    waiting: Sequence[Waiting], free_slots: int, client_running: dict[str, int]
) -> Waiting | None:
    """Who starts next: the client with least running, of it the request with least running, then age.

    A request for many candidates thus does not keep others out, and a request whose turn it is waits for
    its slots instead of being overtaken for ever.
    """
    if not waiting:
        return None
    first = min(waiting, key=lambda w: (client_running.get(w.client, 0), w.running, w.arrival))
    return first if first.slots <= free_slots else None


def plan_step(running: Sequence[Running], chunk: int) -> StepPlan:
    """All that decode advance by a token; of those that prefill the least recently served by a chunk.

    Chunks end at multiples of ``chunk`` counted from the sequence's beginning and hold one sequence, and
    decode and prefill are computed apart: the shape of each computation, on which llama.cpp's rounding
    depends, is then the same whatever else is being served.
    """
    active = [r for r in running if not r.paused]
    decode = tuple(r.key for r in active if not r.prefilling)
    prefilling = [r for r in active if r.prefilling]
    if not prefilling:
        return StepPlan(decode)
    chosen = min(prefilling, key=lambda r: (r.served, r.started))
    boundary = (chosen.computed // chunk + 1) * chunk
    end = min(boundary, chosen.computed + chosen.pending)
    return StepPlan(decode, chosen.key, chosen.computed, end)


def victims(running: Sequence[Running], keep: int | None = None) -> list[int]:
    """Candidates in the order in which they give way when the cells run out: the youngest first.

    The oldest never gives way, so something always gets on.
    """
    by_age = sorted(running, key=lambda r: r.started)
    return [r.key for r in reversed(by_age[1:]) if r.key != keep]
