"""From a GenerationRequest to a Group: everything that can be refused is refused here, to its submitter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..engine.protocol import Engine, TokenSampler
from ..errors import (
    EmptyPromptError,
    InvalidParameterError,
    LlamaherdError,
    OutOfSequencesError,
    PromptTooLongError,
    TokenError,
)
from ..types import GenerationRequest
from .beam import BeamSearch
from .draws import new_seed
from .handle import Handle
from .sequence import Candidate, Group
from .text import TextStream

__all__ = ["Intake"]


class Intake:
    """Checks requests and makes what the scheduler works on."""

    def __init__(self, engine: Engine, max_sequences: int) -> None:
        self._engine = engine
        self._vocabulary = engine.vocabulary
        self._max_sequences = max_sequences

    def group(self, request: GenerationRequest, on_cancel: Callable[[Handle], None]) -> Group:
        """A group for a request.

        Raises:
            EmptyPromptError, PromptTooLongError, TokenError, GrammarError, InvalidParameterError,
            OutOfSequencesError: the request cannot be served.
        """
        if not isinstance(request, GenerationRequest):
            raise InvalidParameterError("request", request, "a GenerationRequest")
        prompt = np.asarray(self._vocabulary.encode_prompt(request.prompt), np.int32)
        if not len(prompt):
            raise EmptyPromptError
        if len(prompt) >= self._engine.n_ctx:
            raise PromptTooLongError(len(prompt), self._engine.n_ctx)
        for i, token in enumerate(request.stop_tokens):
            self._check_token(token, i)
        if request.beams is not None and request.beams > self._max_sequences:
            raise OutOfSequencesError(request.beams, self._max_sequences, self._max_sequences)
        end = frozenset(request.stop_tokens)
        if not request.ignore_eos:
            end |= self._vocabulary.end_tokens
        seed = request.sampling.seed
        group = Group(
            key=0,
            request=request,
            prompt=prompt,
            handle=Handle(request.request_id, on_cancel),
            end_tokens=end,
            seed=new_seed() if seed is None else seed,
            max_tokens=min(request.max_tokens, self._engine.n_ctx - len(prompt)),
        )
        try:
            self._add_candidates(group)
        except LlamaherdError:
            group.close_samplers()
            raise
        return group

    def _check_token(self, token: int, index: int) -> None:
        if not 0 <= token < self._vocabulary.n_tokens:
            raise TokenError(token, self._vocabulary.n_tokens, index)

    def _add_candidates(self, group: Group) -> None:
        request = group.request
        if request.beams is not None:
            self.restart_beams(group)
            return
        indices = range(request.n) if request.indices is None else request.indices
        group.candidates = [Candidate(group, i, TextStream(request.stop)) for i in indices]
        if group.candidates:
            self.sampler(group.candidates[0])  # now, so that a bad grammar is the submitter's to see
        for candidate in group.candidates:
            self._resume(candidate)

    def _resume(self, candidate: Candidate) -> None:
        """Bring a candidate to where it had come elsewhere."""
        group = candidate.group
        tokens = group.request.resume.get(candidate.index, ())
        if len(tokens) >= group.max_tokens:
            raise InvalidParameterError(
                "resume", len(tokens), f"fewer tokens than max_tokens ({group.max_tokens})"
            )
        for i, token in enumerate(tokens):
            self._check_token(token, i)
            candidate.tokens.append(token)
            self.sampler(candidate).accept(token)
            delta = candidate.stream.push(self.piece(group, token))
            candidate.text += delta.text
            if token in group.end_tokens or delta.stop is not None:
                raise InvalidParameterError(
                    "resume", list(tokens), f"a text that goes on: token {i} ended it"
                )

    def restart_beams(self, group: Group) -> None:
        """Begin a beam search (again)."""
        request = group.request
        group.candidates = [Candidate(group, 0, TextStream())]
        group.beam = BeamSearch(
            request.beams or 1,
            group.max_tokens,
            request.length_penalty,
            group.end_tokens,
            request.stop,
            self._vocabulary.piece,
            forbidden=self._vocabulary.end_tokens if request.ignore_eos else frozenset(),
        )

    def sampler(self, candidate: Candidate) -> TokenSampler:
        """The candidate's sampler, made when first asked for. Raises GrammarError."""
        if candidate.sampler is None:
            group = candidate.group
            # llama.cpp's own draws (mirostat, XTC) start from this; ours are counted (draws.py)
            seed = (group.seed + candidate.index) % 2**32
            config = dataclasses.replace(group.request.sampling, seed=seed)
            candidate.sampler = self._engine.make_sampler(config, group.prompt.tolist())
        return candidate.sampler

    def piece(self, group: Group, token: int) -> bytes:
        """A token's bytes in the text; what ends a text is not part of it."""
        return b"" if token in group.end_tokens else self._vocabulary.piece(token)
