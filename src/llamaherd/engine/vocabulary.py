"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np

from ..config import _integers
from ..errors import InvalidParameterError, RequestError, TokenError, shown
from ..native import model as native
from ..native.handles import Handle
from ..types import Prompt, PromptPart

__all__ = ["Vocabulary"]

_CONTROL = 1 << 3  # LLAMA_TOKEN_ATTR_CONTROL
_PARSED = _CONTROL | 1 << 0  # and LLAMA_TOKEN_ATTR_UNKNOWN: what only parse_special reads from a text


class Vocabulary:
    """A model's vocabulary.

    Text never becomes a control token unless ``parse_special`` says so; BOS is added exactly once.
    """

    def __init__(self, model: Handle) -> None:
        self._model = model
        facts = native.vocabulary_facts(model)
        self.n_tokens: int = facts["n_tokens"]
        self.add_bos: bool = facts["add_bos"]
        self.add_eos: bool = facts["add_eos"]
        self._ids = {name: facts[name] for name in ("bos", "eos", "eot", "sep", "nl", "pad")}
        self._pieces: dict[int, bytes] = {}

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a generation."""
        return native.end_tokens(self._model)

    def _special(self, name: str) -> int | None:
        token = self._ids[name]
        return token if token >= 0 else None

    @property
    def bos(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._special("bos")

    @property
    def eos(self) -> int | None:
        """The token that ends a text, if the model has one."""
        return self._special("eos")

    @property
    def eot(self) -> int | None:
        """The token that ends a turn, if the model has one."""
        return self._special("eot")

    @property
    def pad(self) -> int | None:
        """The padding token, if the model has one."""
        return self._special("pad")

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.end_tokens

    def is_control(self, token: int) -> bool:
        """Whether the token is a control token, which user text must never become."""
        self._check(token)
        return bool(native.token_attributes(self._model, token) & _CONTROL)

    def control_texts(self) -> dict[str, int]:
        """The texts of all control tokens (the unknown token too) and their ids."""
        found = {}
        for token in range(self.n_tokens):
            if native.token_attributes(self._model, token) & _PARSED:
                found[native.token_piece(self._model, token, special=True).decode("utf-8", "replace")] = token
        return found

    def _check(self, token: int, index: int | None = None) -> None:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < self.n_tokens:
            raise TokenError(token, self.n_tokens, index)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text (llama_tokenize).

        Args:
            add_special: put BOS (and what else the model wants) around the text. A text that already
                begins with BOS, as chat templates write it, does not get a second one.
            parse_special: let the texts of control tokens become those tokens. Only for text you wrote.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text to tokenize is a str, not {shown(text)}")
        tokens = native.tokenize(
            self._model, _utf8(text), add_special=add_special, parse_special=parse_special
        )
        if add_special and self.add_bos and tokens[:1] == [self.bos] and tokens[1:2] == [self.bos]:
            del tokens[0]
        return tokens

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt: text, ids or parts (see GenerationRequest.prompt).

        Raises:
            TokenError: a given id is out of range.
            RequestError: the prompt is none of the three.
        """
        if isinstance(prompt, str):
            tokens = self.encode(prompt)
        elif isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (Sequence, np.ndarray)):
            raise _no_prompt(prompt)
        elif all(isinstance(part, PromptPart) for part in prompt):
            tokens = []
            for i, part in enumerate(cast(Sequence[PromptPart], prompt)):
                tokens += self.encode(part.text, add_special=i == 0, parse_special=part.parse_special)
        else:
            return self._ids_as_given(cast(Sequence[int], prompt))
        if self.add_eos and tokens and tokens[-1] == self.eos:
            del tokens[-1]  # a prompt is to be continued
        return tokens

    def _ids_as_given(self, prompt: Sequence[int]) -> list[int]:
        try:
            tokens = _integers("prompt", prompt)
        except InvalidParameterError:
            raise _no_prompt(prompt) from None
        for i, token in enumerate(tokens):
            self._check(token, i)
        return list(tokens)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token in running text; control tokens have none unless ``special``.

        Raises:
            TokenError: the id is out of range.
        """
        if special:
            self._check(token)
            return native.token_piece(self._model, token, special=True)
        piece = self._pieces.get(token)
        if piece is None:
            self._check(token)
            piece = self._pieces[token] = native.token_piece(self._model, token, special=False)
        return piece

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are no UTF-8 show as U+FFFD.

        It is the concatenation of the pieces, so it equals what streaming the same tokens gives.
        """
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")


def _no_prompt(prompt: object) -> RequestError:
    return RequestError(f"a prompt is text, token ids or PromptParts, not {shown(prompt)}")


def _utf8(text: str) -> bytes:
    """UTF-8 bytes; lone surrogates, on which llama.cpp would throw, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
