"""Frozen settings, checked when they are made and passed down from there.

Every class refuses unknown keys by naming the nearest known one (:func:`from_mapping`), and every
value outside its range by saying what the range is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import InvalidParameterError, UnknownParameterError

__all__ = ["LoraConfig", "SamplingConfig", "SchedulerConfig", "from_mapping"]

T = TypeVar("T")


def from_mapping(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make the frozen dataclass ``kind`` from a mapping, refusing unknown keys.

    Raises:
        UnknownParameterError: a key is no field of ``kind``; the nearest field is named.
        InvalidParameterError: a value is out of range.
    """
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise UnknownParameterError(key, known, of=kind.__name__)
    return kind(**values)


def _number(name: str, value: Any, low: float, high: float = math.inf, *, integer: bool = False) -> None:
    """Refuse what is not a finite number in [low, high]."""
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        span = f">= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        what = "an integer" if integer else "a number"
        raise InvalidParameterError(name, value, f"{what} {span}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidParameterError(name, value, "a finite number")


def _flag(name: str, value: Any) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise InvalidParameterError(name, value, "true or false")


def _text(name: str, value: Any) -> None:
    """Refuse what is not a text."""
    if not isinstance(value, str):
        raise InvalidParameterError(name, value, "a text")


def _texts(name: str, values: Any, limit: str = "texts that are not empty") -> tuple[str, ...]:
    """The values as a tuple of texts that are not empty."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidParameterError(name, values, "a sequence of texts, not one text")
    texts = tuple(values)
    if any(not isinstance(text, str) or not text for text in texts):
        raise InvalidParameterError(name, texts, limit)
    return texts


def _integers(name: str, values: Any) -> tuple[int, ...]:
    """The values as a tuple of ints. numpy's integers are taken, floats and bools are not."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidParameterError(name, values, "a sequence of integers")
    integers = tuple(values)
    if any(isinstance(value, bool) or not hasattr(value, "__index__") for value in integers):
        raise InvalidParameterError(name, integers, "a sequence of integers")
    return tuple(map(operator.index, integers))


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA adapter to apply to a model.

    Attributes:
        path: a GGUF adapter (llama.cpp's ``general.type = adapter``).
        scale: multiplies the adapter's own alpha / r; 0 switches it off.
    """

    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        _text("path", self.path)
        _number("scale", self.scale, -1e6, 1e6)


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn from the logits.

    The order is llama.cpp's default chain: logit bias, grammar, penalties, DRY, top-n-sigma, top-k,
    typical-p, top-p, min-p, XTC, temperature, then the draw (or mirostat in place of the truncations).

    Attributes:
        temperature: 0 is greedy (the most probable token); default 0.8.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability together; 1 keeps all
            (Holtzman et al. 2019).
        min_p: keep tokens with at least this share of the best one's probability; 0 keeps all.
        typical_p: locally typical sampling (Meister et al. 2022); 1 keeps all.
        top_n_sigma: keep logits within n standard deviations of the best (Tang et al. 2024); <= 0 keeps all.
        dynatemp_range: temperature varies by entropy in [temperature - range, temperature + range]; 0 is off.
        dynatemp_exponent: how entropy maps to temperature.
        xtc_probability, xtc_threshold: exclude top choices; probability 0 is off.
        repeat_penalty: divides (positive) logits of tokens seen in the last ``penalty_last_n``; 1 is off.
        frequency_penalty, presence_penalty: subtracted per occurrence and once, as in OpenAI's API; 0 is off.
        penalty_last_n: window of the penalties in tokens; -1 is the whole context, 0 is off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: DRY
            repetition penalty; multiplier 0 is off.
        mirostat: 0 off, 1 or 2 the version (Basu et al. 2020); mirostat_tau, mirostat_eta its targets.
        logit_bias: token id -> value in [-1e9, 1e9] added to its logit; ``-inf`` forbids it.
        grammar: a GBNF grammar that the text must follow; its root rule is ``grammar_root``.
        json_schema: a JSON schema, as JSON text, that the text must follow (needs llguidance); it excludes
            ``grammar``.
        seed: 0 <= seed < 2**32; None draws one. Token number t of candidate i depends on (seed, i, t) only,
            so a request continued elsewhere gives the same tokens.
        min_keep: truncations always keep at least this many tokens.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    grammar_root: str = "root"
    json_schema: str | None = None
    seed: int | None = None
    min_keep: int = 1

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        _number("top_k", self.top_k, 0, 2**31 - 1, integer=True)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            _number(name, getattr(self, name), 0, 1)
        _number("top_n_sigma", self.top_n_sigma, -1e6, 1e6)
        _number("dynatemp_range", self.dynatemp_range, 0, 100)
        _number("dynatemp_exponent", self.dynatemp_exponent, 0, 100)
        _number("repeat_penalty", self.repeat_penalty, 1e-3, 1e3)
        _number("frequency_penalty", self.frequency_penalty, -100, 100)
        _number("presence_penalty", self.presence_penalty, -100, 100)
        for name in ("penalty_last_n", "dry_penalty_last_n"):
            _number(name, getattr(self, name), -1, 2**31 - 1, integer=True)
        _number("dry_multiplier", self.dry_multiplier, 0, 100)
        _number("dry_base", self.dry_base, 0, 100)
        _number("dry_allowed_length", self.dry_allowed_length, 0, 2**31 - 1, integer=True)
        _number("mirostat", self.mirostat, 0, 2, integer=True)
        _number("mirostat_tau", self.mirostat_tau, 0, 1e3)
        _number("mirostat_eta", self.mirostat_eta, 0, 1e3)
        _number("min_keep", self.min_keep, 0, 2**31 - 1, integer=True)
        if self.json_schema is not None:
            if not isinstance(self.json_schema, str):
                raise InvalidParameterError("json_schema", self.json_schema, "JSON text: json.dumps(schema)")
            if self.grammar is not None:
                raise InvalidParameterError("json_schema", self.json_schema[:80], "not beside a grammar")
        if self.seed is not None:
            _number("seed", self.seed, 0, 2**32 - 1, integer=True)
        self._check_texts()
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameterError("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            _number("logit_bias's token id", token, 0, integer=True)
            if bias != -math.inf:
                _number(f"logit_bias[{token}]", bias, -1e9, 1e9)

    def _check_texts(self) -> None:
        _text("grammar_root", self.grammar_root)
        if self.grammar is not None:
            _text("grammar", self.grammar)
        limit = "texts that are not empty, without NUL and lone surrogates"
        breakers = _texts("dry_sequence_breakers", self.dry_sequence_breakers, limit)
        if any("\0" in b or any("\ud800" <= c <= "\udfff" for c in b) for b in breakers):
            raise InvalidParameterError("dry_sequence_breakers", breakers, limit)
        object.__setattr__(self, "dry_sequence_breakers", breakers)

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are forbidden or favoured beyond what the model says (and truncations leave)."""
        return bool(
            self.grammar is not None
            or self.json_schema is not None
            or self.logit_bias
            or self.repeat_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.dry_multiplier
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0 and self.mirostat == 0

    def replace(self, **changes: Any) -> SamplingConfig:
        """A copy with some fields changed; unknown names are refused."""
        known = [f.name for f in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise UnknownParameterError(key, known, of="SamplingConfig")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class SchedulerConfig:
    """How the scheduler shares one engine among requests.

    Attributes:
        max_sequences: sequences decoded at once; None takes what the engine offers.
        max_queue: requests that may wait; one more is refused with QueueFullError.
        max_buffered_events: events a request may hold unread; a slower reader's request is paused.
        prefill_chunk: most prompt tokens in one step while other sequences decode, so that a long prompt
            does not stall them; None takes the engine's n_batch when nobody else decodes.
        prefix_cache: keep finished sequences' KV for prompts that begin alike.
    """

    max_sequences: int | None = None
    max_queue: int = 1024
    max_buffered_events: int = 65536
    prefill_chunk: int = 256
    prefix_cache: bool = True

    @property
    def slots(self) -> int:
        """max_sequences, or what a context of our own making gets: 16."""
        return self.max_sequences or 16

    @property
    def n_seq_max(self) -> int:
        """Sequences that a context wants for this: as many idle ones for the prefix cache as can run."""
        return min(self.slots * (2 if self.prefix_cache else 1), 256)

    def __post_init__(self) -> None:
        if self.max_sequences is not None:
            _number("max_sequences", self.max_sequences, 1, 256, integer=True)
        _number("max_queue", self.max_queue, 1, integer=True)
        _number("max_buffered_events", self.max_buffered_events, 1, integer=True)
        _number("prefill_chunk", self.prefill_chunk, 1, integer=True)
        _flag("prefix_cache", self.prefix_cache)
