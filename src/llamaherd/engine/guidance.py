"""Text that must follow a JSON schema: llguidance says which tokens may come, a sampler draws among them.

llguidance (Guidance AI) parses the text with an Earley parser over lexemes and walks the vocabulary as a
trie; a mask costs well under a millisecond.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GrammarError, UnsupportedError
from .protocol import FloatArray, TokenSampler
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Guide", "GuidedSampler", "check_schema"]

_DEEPEST = 64
_LONGEST = 500_000
_MOST_VALUES = 5_000  # llguidance takes many seconds for more
_KEYS_OF_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(text: str) -> Any:
    """A schema from its JSON text, refused if it is too long, too deep, or refers to anything outside itself.

    Raises:
        GrammarError: with the reason.
    """
    if len(text) > _LONGEST:
        raise GrammarError(text, f"the schema has {len(text)} characters; at most {_LONGEST} are taken")
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(text, f"the schema is no JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise GrammarError(text, "a schema is an object or a boolean")
    pending: list[tuple[Any, int]] = [(schema, 1)]
    values = 0
    while pending:
        values += 1
        if values > _MOST_VALUES:
            raise GrammarError(text, f"the schema holds more than {_MOST_VALUES} values")
        value, depth = pending.pop()
        if depth > _DEEPEST:
            raise GrammarError(text, f"the schema is nested more than {_DEEPEST} deep")
        if isinstance(value, dict):
            for key in _KEYS_OF_REFERENCES:
                reference = value.get(key)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise GrammarError(text, f"{key} {reference[:80]!r} leads outside of the schema")
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
    return schema


def _reason(matcher: LLMatcher) -> str:
    """What it says is wrong, without the dump of its state."""
    return matcher.get_error().partition("\n<state>")[0][:500]


class Guide:
    """What llguidance knows of a model's vocabulary; made once a model, on first use (about a second)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def matcher(self, schema_text: str) -> LLMatcher:
        """A parser of texts that follow a schema.

        Raises:
            GrammarError: the schema is invalid, too large, or asks for what llguidance cannot do.
            UnsupportedError: llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UnsupportedError(
                "a JSON schema needs llguidance: pip install 'llamaherd[server]'"
            ) from error
        check_schema(schema_text)
        try:
            # no free whitespace: small models are prone to write nothing else
            grammar = LLMatcher.grammar_from_json_schema(
                schema_text,
                overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
            matcher = LLMatcher(self._llguidance(), grammar, log_level=0)
        except BaseException as error:  # a Rust panic is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise GrammarError(schema_text, f"llguidance refuses it: {str(error)[:500]}") from error
        if matcher.is_error():
            raise GrammarError(schema_text, f"llguidance refuses it: {_reason(matcher)}")
        return matcher

    def _llguidance(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                described = _Described(self._vocabulary)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(described), eos_token=sorted(self._vocabulary.end_tokens)
                )
            return self._tokenizer


class _Described:
    """A vocabulary in the words of llguidance's TokenizerWrapper."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        control = set(vocabulary.control_texts().values())
        self.special_token_ids = sorted(control)
        self.tokens = [
            # a control token has no bytes in running text; its name must not be mistaken for some
            vocabulary.piece(t, special=True) if t in control else vocabulary.piece(t)
            for t in range(vocabulary.n_tokens)
        ]
        self.bos_token_id = vocabulary.bos
        self.eos_token_id = min(vocabulary.end_tokens) if vocabulary.end_tokens else 0

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._vocabulary.encode(text, add_special=False)


class GuidedSampler:
    """A sampler that only draws tokens which a parser allows.

    Args:
        inner: draws.
        matcher: allows; belongs to this sampler alone.
        grammar: for messages.
    """

    def __init__(self, inner: TokenSampler, matcher: LLMatcher, n_vocab: int, grammar: str) -> None:
        self._inner = inner
        self._matcher = matcher
        self._grammar = grammar
        self._mask = np.zeros((n_vocab + 31) // 32, np.int32)

    def sample(self, logits: FloatArray, draw: float) -> int:
        """The next token id. Raises GrammarError if none may come, and as the inner sampler does."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._grammar, _reason(self._matcher))
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: logits.size].astype(np.bool_)
        if not (allowed & (logits > -np.inf)).any():
            raise GrammarError(self._grammar, "it allows no token here")
        return self._inner.sample(np.where(allowed, logits, np.float32(-np.inf)), draw)

    def accept(self, token: int) -> None:
        """Note a token of the text. Raises GrammarError if it does not fit."""
        if not self._matcher.consume_token(token):
            raise GrammarError(self._grammar, f"token {token} does not fit: {_reason(self._matcher)}")
        self._inner.accept(token)

    def close(self) -> None:
        """Free what the inner sampler holds; idempotent."""
        self._inner.close()
