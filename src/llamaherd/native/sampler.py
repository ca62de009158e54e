"""llama.cpp's sampler chains over numpy candidates."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .handles import Handle, Pointer
from .library import L

__all__ = ["CANDIDATE", "Candidates", "Chain", "candidates"]

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""The layout of llama_token_data."""


class Candidates:
    """A llama_token_data_array over a numpy buffer."""

    def __init__(self, n_vocab: int) -> None:
        self._buffer = np.zeros(n_vocab, CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = ctypes.cast(self._buffer.ctypes.data, ctypes.POINTER(L.llama_token_data))
        self._struct = L.llama_token_data_array(data=self._data, size=0, selected=-1, sorted=False)

    def load(self, logits: NDArray[np.float32]) -> None:
        """All tokens, with these logits [n_vocab]."""
        self._buffer["id"] = self._ids
        self._buffer["logit"] = logits
        self._reset(len(self._buffer))

    def load_one(self, token: int) -> None:
        """One token with logit 1."""
        self._buffer[0] = (token, 1.0, 0.0)
        self._reset(1)

    def _reset(self, size: int) -> None:
        self._struct.data = self._data  # a sampler that sorts leaves its own buffer here
        self._struct.size = size
        self._struct.selected = -1
        self._struct.sorted = False

    def apply(self, chain: Chain) -> None:
        """Let a chain remove candidates and change logits."""
        L.llama_sampler_apply(chain.handle.pointer, ctypes.byref(self._struct))

    @property
    def left(self) -> NDArray[np.void]:
        """The candidates that are left, of fields id, logit, p: a view until the next call."""
        size = int(self._struct.size)
        address = ctypes.cast(self._struct.data, ctypes.c_void_p).value or 0
        if address == self._buffer.ctypes.data:
            return self._buffer[:size]
        raw = (ctypes.c_uint8 * (size * CANDIDATE.itemsize)).from_address(address)
        return np.frombuffer(memoryview(raw), CANDIDATE)

    @property
    def selected(self) -> int | None:
        """The token that a chain selected, if one did."""
        i = int(self._struct.selected)
        return int(self.left["id"][i]) if i >= 0 else None


def candidates(n_vocab: int) -> Candidates:
    """A candidates buffer for a vocabulary."""
    return Candidates(n_vocab)


class Chain:
    """An owned llama_sampler_chain; each method adds one of llama.cpp's samplers at its end."""

    def __init__(self) -> None:
        params = L.llama_sampler_chain_default_params()
        params.no_perf = True
        self.handle = Handle(L.llama_sampler_chain_init(params), L.llama_sampler_free, "sampler")
        self.size = 0
        self._held: list[Pointer] = []

    def _hold(self, model: Handle) -> Pointer:
        """The model's pointer, which samplers that know its vocabulary use as long as the chain lives."""
        self._held.append(model.pointer)
        return self._held[-1]

    def _add(self, sampler: int | None) -> bool:
        if not sampler:
            return False
        L.llama_sampler_chain_add(self.handle.pointer, sampler)
        self.size += 1
        return True

    def logit_bias(self, n_vocab: int, bias: Mapping[int, float]) -> None:
        """llama_sampler_init_logit_bias."""
        array = (L.llama_logit_bias * len(bias))(*[(t, b) for t, b in bias.items()])
        self._add(L.llama_sampler_init_logit_bias(n_vocab, len(bias), array))

    def grammar(self, model: Handle, text: str, root: str) -> bool:
        """llama_sampler_init_grammar; False if it does not parse."""
        vocab = L.llama_model_get_vocab(self._hold(model))
        return self._add(L.llama_sampler_init_grammar(vocab, text.encode(), root.encode()))

    def penalties(self, n_vocab: int, last_n: int, repeat: float, frequency: float, presence: float) -> None:
        """llama_sampler_init_penalties."""
        self._add(L.llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence))

    def dry(
        self,
        model: Handle,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> None:
        """llama_sampler_init_dry."""
        vocab = L.llama_model_get_vocab(self._hold(model))
        array = (ctypes.c_char_p * len(breakers))(*[b.encode() for b in breakers])
        self._add(
            L.llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, array, len(breakers))
        )

    def top_n_sigma(self, n: float) -> None:
        """llama_sampler_init_top_n_sigma."""
        self._add(L.llama_sampler_init_top_n_sigma(n))

    def top_k(self, k: int) -> None:
        """llama_sampler_init_top_k."""
        self._add(L.llama_sampler_init_top_k(k))

    def typical(self, p: float, min_keep: int) -> None:
        """llama_sampler_init_typical."""
        self._add(L.llama_sampler_init_typical(p, min_keep))

    def top_p(self, p: float, min_keep: int) -> None:
        """llama_sampler_init_top_p."""
        self._add(L.llama_sampler_init_top_p(p, min_keep))

    def min_p(self, p: float, min_keep: int) -> None:
        """llama_sampler_init_min_p."""
        self._add(L.llama_sampler_init_min_p(p, min_keep))

    def xtc(self, probability: float, threshold: float, min_keep: int, seed: int) -> None:
        """llama_sampler_init_xtc."""
        self._add(L.llama_sampler_init_xtc(probability, threshold, min_keep, seed))

    def temperature(self, temperature: float, range_: float, exponent: float) -> None:
        """llama_sampler_init_temp_ext (plain temperature where the range is 0)."""
        self._add(L.llama_sampler_init_temp_ext(temperature, range_, exponent))

    def mirostat(self, version: int, n_vocab: int, seed: int, tau: float, eta: float) -> None:
        """llama_sampler_init_mirostat or _v2; these select the token themselves."""
        if version == 1:
            self._add(L.llama_sampler_init_mirostat(n_vocab, seed, tau, eta, 100))
        else:
            self._add(L.llama_sampler_init_mirostat_v2(seed, tau, eta))

    def accept(self, token: int) -> None:
        """llama_sampler_accept."""
        L.llama_sampler_accept(self.handle.pointer, token)

    def close(self) -> None:
        """Free the chain and its samplers; idempotent."""
        self.handle.close()
        self._held.clear()
