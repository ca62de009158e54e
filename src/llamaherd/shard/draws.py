"""Draws and picks on their way to the last stage and back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig
from ..engine.model import Model
from ..engine.picks import pick_token
from ..engine.protocol import Draw, FloatArray, Pick, Row, TokenSampler
from ..engine.sampling import make_sampler
from ..errors import LlamaherdError
from ..logits import check_finite, log_normalizers
from ..wire_errors import WireError, pack_error, unpack_error

__all__ = ["Drawer", "pack_draws", "pack_picks", "unpack_draws", "unpack_picks"]

_MOST_SAMPLERS = 64


class Drawer:
    """Draws tokens from a model's logits, with settings that need no memory of the text."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self._samplers: dict[bytes, TokenSampler] = {}

    def draw(self, logits: FloatArray, draws: Sequence[Draw | None]) -> list[Row]:
        """Each row [n_vocab] of logits, or what was drawn from it, or why nothing could be."""
        norms = log_normalizers(logits)
        rows: list[Row] = []
        for row, norm, draw in zip(logits, norms, draws, strict=True):
            if draw is None:
                rows.append(row)
                continue
            try:
                check_finite(row)
                rows.append(pick_token(self._sampler(draw.sampling), row, float(norm), draw))
            except LlamaherdError as error:
                rows.append(error)
        return rows

    def _sampler(self, config: SamplingConfig) -> TokenSampler:
        key = msgspec.msgpack.encode(config)
        sampler = self._samplers.get(key)
        if sampler is None:
            if len(self._samplers) >= _MOST_SAMPLERS:
                self.close()
            sampler = self._samplers[key] = make_sampler(self._model, config, self._n_ctx)
        return sampler

    def close(self) -> None:
        """Free what the samplers hold."""
        while self._samplers:
            self._samplers.popitem()[1].close()


class _WireDraws(msgspec.Struct, frozen=True, array_like=True):
    """Draws: for each row (index of its settings, number, top, without) or None."""

    samplings: list[SamplingConfig]
    rows: list[tuple[int, float, int, list[int]] | None]


_WirePick = tuple[int, float, list[tuple[int, float]], bool]


class _WirePicks(msgspec.Struct, frozen=True, array_like=True):
    """For each wanted row a pick, an error, or nothing where its logits travel."""

    picks: list[_WirePick | None]
    errors: dict[int, WireError]


def pack_draws(draws: Sequence[Draw | None] | None) -> bytes:
    """For the wire; empty if nothing is drawn."""
    if draws is None:
        return b""
    samplings: dict[int, tuple[int, SamplingConfig]] = {}
    rows: list[tuple[int, float, int, list[int]] | None] = []
    for draw in draws:
        if draw is None:
            rows.append(None)
            continue
        index, _ = samplings.setdefault(id(draw.sampling), (len(samplings), draw.sampling))
        rows.append((index, draw.number, draw.top, list(draw.without)))
    return msgspec.msgpack.encode(_WireDraws([s for _, s in samplings.values()], rows))


def unpack_draws(data: bytes) -> tuple[Draw | None, ...] | None:
    """From the wire. Raises msgspec.MsgspecError, IndexError."""
    if not data:
        return None
    wire = msgspec.msgpack.decode(data, type=_WireDraws)
    return tuple(
        None if row is None else Draw(wire.samplings[row[0]], row[1], row[2], tuple(row[3]))
        for row in wire.rows
    )


def pack_picks(rows: Sequence[Row]) -> tuple[bytes, FloatArray | None]:
    """What was drawn, and the logits [n, n_vocab] of the other rows."""
    picks: list[_WirePick | None] = []
    errors: dict[int, WireError] = {}
    logits = []
    for i, row in enumerate(rows):
        picks.append(None)
        if isinstance(row, Pick):
            picks[i] = (row.token, row.logprob, list(row.top), row.complete)
        elif isinstance(row, LlamaherdError):
            errors[i] = pack_error(row)
        else:
            logits.append(row)
    return msgspec.msgpack.encode(_WirePicks(picks, errors)), np.stack(logits) if logits else None


def unpack_picks(data: bytes, logits: FloatArray | None) -> list[Row]:
    """The rows that pack_picks() has taken apart. Raises msgspec.MsgspecError."""
    wire = msgspec.msgpack.decode(data, type=_WirePicks)
    left: NDArray[np.float32] = np.empty((0, 0), np.float32) if logits is None else logits
    others = iter(left)
    rows: list[Row] = []
    for i, pick in enumerate(wire.picks):
        if i in wire.errors:
            rows.append(unpack_error(wire.errors[i]))
        elif pick is None:
            rows.append(next(others))
        else:
            rows.append(Pick(pick[0], pick[1], tuple(pick[2]), pick[3]))
    return rows
