"""A context: the KV cache and the forward pass over it. Nothing here can abort the process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig
from ..errors import (
    ClosedError,
    ContextError,
    DecodeAbortedError,
    DecodeError,
    InvalidParameterError,
    OutOfCellsError,
    RequestError,
    UnsupportedError,
)
from ..native import context as native
from ..native.handles import Handle
from ..native.library import forget_log, recent_log
from . import state
from .batches import check_batch
from .memory import Memory
from .model import Model
from .outputs import Outputs, Part, join, target_rows
from .protocol import Batch, FloatArray, TokenSampler
from .sampling import make_sampler
from .settings import check_settings, default_settings
from .texts import as_batch, check_texts, take_group
from .ubatches import ubatches
from .vocabulary import Vocabulary

__all__ = ["Context", "Outputs"]


class Context:
    """An Engine over one model.

    Calls from several threads are serialised; abort() may come from any thread at any time.

    Args:
        model: closing it closes the context.
        layer_outputs: make the hidden states after any layer available to run(); each graph node then
            costs a call into Python.
        params: llama.cpp's own context parameters by their names. Other defaults than llama.cpp's:
            ``n_ctx`` is the trained length, at most 4096; ``n_threads`` the CPUs this process may use;
            ``kv_unified`` is true, so that forks share their cells; ``no_perf`` is true.

    Raises:
        UnknownParameterError, InvalidParameterError: a parameter is.
        ContextError: llama.cpp refused (its log is in the message), or the memory would not suffice.
    """

    def __init__(self, model: Model, *, layer_outputs: bool = False, **params: Any) -> None:
        self.model = model
        self._lock = threading.RLock()
        self._abort = native.AbortFlag()
        self._tap = native.LayerTap() if layer_outputs else None
        settings = default_settings(model) | params
        check_settings(model, settings)
        forget_log()
        handle = native.new_context(model.handle, settings, self._abort, self._tap)
        if handle is None:
            raise ContextError(f"llama.cpp could not make a context with {settings}", recent_log())
        self._handle = handle
        self._facts = native.context_facts(handle)
        self.unified = bool(settings["kv_unified"])
        self.params = settings
        self._batch = native.BatchBuffer(self.n_batch, model.n_embd)
        self._hidden_on = bool(settings.get("embeddings", False))
        recurrent = model.is_recurrent
        shared = self.unified and not recurrent
        self.memory = Memory(
            handle,
            self._lock,
            n_sequences=self._facts["n_seq_max"],
            n_cells=self.n_ctx * (1 if shared else self._facts["n_seq_max"]),
            unified=shared,
            # a window that drops what lies before it cannot go back there
            can_trim=not recurrent and (not model.n_swa or bool(settings.get("swa_full", True))),
            settle=self._settle,
        )
        self._lora_scales: tuple[float, ...] = ()
        if model.adapters:
            self.scale_loras([scale for _, scale in model.adapters])
        model.owns(self)

    # -------------------------------------------------------------------------------- facts

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""
        return self.model.vocabulary

    @property
    def n_ctx(self) -> int:
        """Most tokens of one sequence, as llama.cpp rounded it."""
        return self._facts["n_ctx"] if self.unified else self._facts["n_ctx_seq"]

    @property
    def n_batch(self) -> int:
        """Most tokens of one llama_decode; longer batches are split."""
        return self._facts["n_batch"]

    @property
    def n_ubatch(self) -> int:
        """Most tokens of one forward pass."""
        return self._facts["n_ubatch"]

    @property
    def n_seq_max(self) -> int:
        """Most sequences."""
        return self._facts["n_seq_max"]

    @property
    def n_threads(self) -> int:
        """Threads of a decode."""
        return self._facts["n_threads"]

    @property
    def generates(self) -> bool:
        """Whether decode() and run() can be used: not with encoders, nor with encoder-decoder models."""
        return native.has_memory(self._handle) and not self.model.has_encoder

    # ------------------------------------------------------------------------------- decode

    def decode(self, batch: Batch) -> FloatArray:
        """Compute a batch; logits float32 [n wanted, n_vocab] in batch order.

        A batch of at most ``n_batch`` tokens gives a view of llama.cpp's buffer, valid until the next
        call of this context; copy what must live longer.

        Raises:
            TokenError, PositionError, SequenceError, OutOfCellsError: the batch is not valid; nothing ran.
            DecodeAbortedError: abort() was called; the sequences are as before.
            DecodeError: llama.cpp failed; the sequences are as before (recurrent ones empty).
        """
        logits = self.run(batch).logits
        assert logits is not None
        return logits

    def run(
        self,
        batch: Batch,
        *,
        logits: bool = True,
        hidden: bool = False,
        layers: Sequence[int] = (),
        into: tuple[FloatArray, NDArray[np.intp]] | None = None,
    ) -> Outputs:
        """Compute a batch and choose what it puts out; see decode().

        Args:
            logits: the wanted tokens' logits.
            hidden: their last hidden states, after the final norm.
            layers: the hidden states after these layers (needs ``layer_outputs=True``), -1 being what enters
                the first one. Without ``logits`` and ``hidden`` nothing behind the last of them is computed.
                Of recurrent models the batch is then computed sequence by sequence.
            into: float32 [rows, n_vocab] and the row for each wanted token: the logits are copied there, once
                and before any other thread's decode, and are the array that is returned.

        Raises:
            UnsupportedError: a layer's output is not to be had; the model is an encoder.
        """
        with self._lock:
            self._check_open()
            if not self.generates:
                raise UnsupportedError(
                    f"{self.model.architecture} models do not decode token by token; embed() takes encoders, "
                    "and of encoder-decoder models nothing is supported"
                )
            return self._run(batch, logits, hidden, layers, into)

    def _run(
        self,
        batch: Batch,
        logits: bool,
        hidden: bool,
        layers: Sequence[int] = (),
        into: tuple[FloatArray, NDArray[np.intp]] | None = None,
    ) -> Outputs:
        with self._lock:
            appended = self._check(batch)
            layers = self._check_layers(layers)
            before = {s: self.memory.length(s) for s in appended}
            target = None if into is None else target_rows(batch, into, self.vocabulary.n_tokens)
            self._abort.clear()
            try:
                calls = self._parts(batch, in_order=bool(layers))
                parts = [self._run_part(batch, part, logits, hidden, layers, target) for part in calls]
            except BaseException:
                for sequence, length in before.items():
                    self.memory.roll_back(sequence, length)
                raise
            for sequence, count in appended.items():
                self.memory.appended(sequence, count)
            if into is not None and not (hidden or layers):
                return Outputs(logits=into[0])
            outputs = join(batch, parts, logits, hidden, layers, self.vocabulary.n_tokens, self.model.n_embd)
            return outputs if into is None else dataclasses.replace(outputs, logits=into[0])

    def _parts(self, batch: Batch, *, in_order: bool) -> list[NDArray[np.intp]]:
        """Indices of the tokens of each llama_decode call; ``in_order``: each is one forward pass."""
        index = np.arange(len(batch))
        if in_order and self.model.is_recurrent:
            calls = [np.flatnonzero(batch.sequences == s) for s in dict.fromkeys(batch.sequences.tolist())]
            return [c[a : a + self.n_ubatch] for c in calls for a in range(0, len(c), self.n_ubatch)]
        calls = [index[a : a + self.n_batch] for a in range(0, len(batch), self.n_batch)]
        if not in_order:
            return calls
        # the tap sees the rows of a forward pass in llama.cpp's order, which must be known
        return [
            call[part]
            for call in calls
            for part in ubatches(batch.sequences[call], self.n_ubatch, unified=self.unified)
        ]

    def _run_part(
        self,
        batch: Batch,
        part: NDArray[np.intp],
        logits: bool,
        hidden: bool,
        layers: Sequence[int],
        target: tuple[FloatArray, NDArray[np.intp]] | None = None,
    ) -> Part:
        wanted = batch.outputs[part]
        everything = bool(layers) or hidden  # hidden states come for all tokens or not at all
        self._want_hidden(hidden)
        if self._tap is not None:
            self._tap.record(layers, stop=not (logits or hidden))
        outputs = np.ones(len(part), np.bool_) if everything else wanted
        limit = self.params.get("n_outputs_max", 0) or self.n_batch
        if outputs.sum() > limit:
            raise RequestError(
                f"{outputs.sum()} outputs of one forward pass are wanted, n_outputs_max is {limit}; "
                "make the context with a larger one"
            )
        native_batch = self._batch.fill(
            None if batch.tokens is None else batch.tokens[part],
            None if batch.embeddings is None else batch.embeddings[part],
            batch.positions[part],
            batch.sequences[part],
            outputs,
        )
        self._decode(native_batch, len(part))
        rows = len(part) if everything or self._hidden_on else int(wanted.sum())
        index = np.flatnonzero(wanted) if rows == len(part) else np.arange(rows)
        # a view lives until the next decode: copy where this call makes several, or rows are left out
        only = len(part) == len(batch) and len(index) == rows
        picked = slice(None) if only else index
        n_vocab = self.vocabulary.n_tokens
        part_logits = None
        if logits and rows and target is None:
            part_logits = native.logits(self._handle, rows, n_vocab)[picked]
        elif logits and rows and target is not None:
            view = native.logits(self._handle, rows, n_vocab)
            for row, place in zip(index.tolist(), target[1][part[wanted]].tolist(), strict=True):
                target[0][place] = view[row]
        part_hidden = (
            native.tensor_rows(self._handle, rows, self.model.n_embd)[picked] if hidden and rows else None
        )
        part_layers = {}
        for layer in layers:
            arrays = self._tap.layers.get(layer) if self._tap is not None else None
            if not arrays:
                raise UnsupportedError(
                    f"this architecture ({self.model.architecture}) does not name the output of layer {layer}"
                )
            part_layers[layer] = np.concatenate(arrays).reshape(len(part), self.model.n_embd)[picked]
        return part[wanted], part_logits, part_hidden, part_layers

    def _settle(self, sequence: int, position: int) -> None:
        self._abort.clear()
        native.memory_settle(self._handle, sequence, position)

    def _want_hidden(self, on: bool) -> None:
        if on != self._hidden_on and not self.params.get("embeddings", False):
            native.set_embeddings(self._handle, on)
            self._hidden_on = on

    def _decode(self, native_batch: Any, n: int) -> None:
        code = native.decode(self._handle, native_batch)
        if code == 0:
            return
        if code == 1:
            raise OutOfCellsError(n, self.memory.used_cells, self.memory.n_cells)
        if code == 2:
            raise DecodeAbortedError
        raise DecodeError(code, "llama.cpp could not compute this batch", recent_log())

    def _check(self, batch: Batch) -> dict[int, int]:
        n_vocab, n_embd = self.vocabulary.n_tokens, self.model.n_embd
        return check_batch(batch, self.memory, n_ctx=self.n_ctx, n_vocab=n_vocab, n_embd=n_embd)

    def _check_layers(self, layers: Sequence[int]) -> Sequence[int]:
        if layers and self._tap is None:
            raise UnsupportedError("make the context with layer_outputs=True to see layers' hidden states")
        for layer in layers:
            if not -1 <= layer < self.model.n_layer:
                raise InvalidParameterError("layers", layer, f"a layer in [-1, {self.model.n_layer})")
        return layers

    # --------------------------------------------------------------------------- embeddings

    def embed(self, texts: Sequence[Sequence[int]], *, normalize: bool = True) -> FloatArray:
        """One embedding for each token list: float32 [n, n_embd_out].

        Models with a pooling type (embedding models) pool as they were trained; of others the mean of the
        last hidden states is taken. As many texts as fit go through one forward pass.

        Args:
            texts: token ids, at least one each.
            normalize: scale each embedding to length 1.

        Raises:
            PromptTooLongError: a text is longer than a forward pass can take (n_ubatch; encoders see
                whole texts).
            TokenError, RequestError: a token is out of range; a text is empty.
            OutOfSequencesError, OutOfCellsError: live sequences leave no room.
        """
        with self._lock:
            self._check_open()
            if self.model.has_encoder and self.model.has_decoder:
                raise UnsupportedError("encoder-decoder models give no embeddings here; take an encoder")
            room = min(self.n_ubatch, self.n_batch)
            texts = check_texts(texts, n_vocab=self.vocabulary.n_tokens, longest=room)
            width = self.model.n_embd_out if self._pools else self.model.n_embd
            result = np.empty((len(texts), width), np.float32)
            done = 0
            while done < len(texts):
                group = take_group(texts, done, room=room, sequences=self.memory.free_sequences)
                self._embed_group(group, result[done : done + len(group)])
                done += len(group)
            if normalize:
                lengths = np.linalg.norm(result, axis=1, keepdims=True)
                result /= np.maximum(lengths, np.finfo(np.float32).tiny)
            return result

    @property
    def _pools(self) -> bool:
        return self._facts["pooling_type"] > 0

    def _embed_group(self, group: Sequence[Sequence[int]], rows: FloatArray) -> None:
        ids = [self.memory.allocate() for _ in group]
        try:
            batch = as_batch(group, ids)
            if not self._pools:
                hidden = self._run(batch, logits=False, hidden=True).hidden
                assert hidden is not None
                for i, sequence in enumerate(ids):
                    rows[i] = hidden[batch.sequences == sequence].mean(axis=0)
                return
            self._run_pooled(batch)
            for i, sequence in enumerate(ids):
                pooled = native.pooled(self._handle, sequence, rows.shape[1])
                if pooled is None:
                    raise DecodeError(0, "llama.cpp gave no embedding", recent_log())
                rows[i] = pooled
        finally:
            for sequence in ids:
                self.memory.release(sequence)

    def _run_pooled(self, batch: Batch) -> None:
        appended = self._check(batch)
        self._abort.clear()
        self._want_hidden(True)
        native_batch = self._batch.fill(batch.tokens, None, batch.positions, batch.sequences, batch.outputs)
        encoder_only = self.model.has_encoder and not self.model.has_decoder
        if encoder_only:
            code = native.encode(self._handle, native_batch)
            if code != 0:
                raise DecodeError(code, "llama.cpp could not encode this batch", recent_log())
        else:
            self._decode(native_batch, len(batch))
        for sequence, count in appended.items():
            self.memory.appended(sequence, count)

    # ----------------------------------------------------------------------------- sampling

    def make_sampler(self, config: SamplingConfig, prompt: Sequence[int] = ()) -> TokenSampler:
        """A sampler for one candidate whose text begins with ``prompt``.

        Raises:
            GrammarError: the grammar or JSON schema is not valid.
            TokenError: ``logit_bias`` names a token outside the vocabulary.
        """
        return make_sampler(self.model, config, self.n_ctx, prompt)

    # ----------------------------------------------------------------------------- adapters

    @property
    def lora_scales(self) -> tuple[float, ...]:
        """The scale of each of the model's adapters here; 0 is off."""
        return self._lora_scales

    def scale_loras(self, scales: Sequence[float]) -> None:
        """Scale the model's adapters, one number each in the order they were added; 0 switches one off.

        What the KV cache already holds was computed with the scales before.

        Raises:
            InvalidParameterError: not one finite number for each adapter.
            ContextError: llama.cpp refused.
        """
        with self._lock:
            self._check_open()
            adapters = self.model.adapters
            if len(scales) != len(adapters) or not all(np.isfinite(s) for s in scales):
                raise InvalidParameterError("scales", scales, f"{len(adapters)} finite numbers")
            self._apply_loras(adapters, scales)
            self._lora_scales = tuple(float(s) for s in scales)

    def drop_lora(self, index: int) -> None:
        """Stop using the model's adapter at ``index``; Model.remove_lora() calls it before it frees one."""
        with self._lock:
            if self._handle.closed or index >= len(self._lora_scales):
                return
            adapters = list(self.model.adapters[: len(self._lora_scales)])
            scales = list(self._lora_scales)
            del adapters[index], scales[index]
            self._apply_loras(adapters, scales)
            self._lora_scales = tuple(scales)

    def _apply_loras(self, adapters: Sequence[tuple[Handle, float]], scales: Sequence[float]) -> None:
        pairs = zip(adapters, scales, strict=True)
        on = [(handle, float(scale)) for (handle, _), scale in pairs if scale]
        if native.set_adapters(self._handle, on) != 0:
            raise ContextError("llama.cpp could not apply the LoRA adapters", recent_log())

    # -------------------------------------------------------------------------------- state

    def save_sequence(self, sequence: int, tokens: Sequence[int] = ()) -> bytes:
        """A sequence's KV state as bytes, which restore_sequence() takes back.

        ``tokens`` may be kept inside, for whoever restores it. Raises SequenceError.
        """
        with self._lock:
            self._check_open()
            length = self.memory.length(sequence)
            self.memory.settle(sequence)
            return state.pack(native.state_get(self._handle, sequence), self._fingerprint(), length, tokens)

    def restore_sequence(self, data: bytes) -> int:
        """A new sequence with a saved state.

        Raises:
            StateMismatchError: the state is damaged, or of another model, KV type or version.
            OutOfSequencesError, OutOfCellsError: no room.
        """
        with self._lock:
            self._check_open()
            saved = state.unpack(data, self._fingerprint())
            if saved.length > self.memory.free_cells:
                raise OutOfCellsError(saved.length, self.memory.used_cells, self.memory.n_cells)
            sequence = self.memory.allocate()
            try:
                self.memory.settle(sequence)
                forget_log()
                if not native.state_set(self._handle, sequence, saved.payload):
                    raise state.refused(recent_log())
                _, last = native.memory_positions(self._handle, sequence)
                if last != saved.length - 1:
                    raise state.refused(f"{saved.length} tokens were saved, it holds {last + 1}")
                self.memory.appended(sequence, saved.length)
            except BaseException:
                self.memory.release(sequence)
                raise
            return sequence

    def save_sequence_file(
        self, sequence: int, path: str | PathLike[str], tokens: Sequence[int] = ()
    ) -> None:
        """save_sequence() into a file, written whole or not at all."""
        state.write(path, self.save_sequence(sequence, tokens))

    def restore_sequence_file(self, path: str | PathLike[str]) -> int:
        """restore_sequence() from a file. Raises StateMismatchError naming it."""
        return self.restore_sequence(state.read(path))

    def _fingerprint(self) -> dict[str, Any]:
        return state.fingerprint_of(self.model, self.params, self._lora_scales)

    # ----------------------------------------------------------------------------- lifetime

    def abort(self) -> None:
        """Stop the decode in flight, if there is one, as soon as llama.cpp asks (many times a forward)."""
        self._abort.set()

    def set_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Threads of decodes, and of batches if given."""
        batch = n_threads if n_threads_batch is None else n_threads_batch
        for name, value in (("n_threads", n_threads), ("n_threads_batch", batch)):
            if not 1 <= value <= 512:
                raise InvalidParameterError(name, value, "an integer in [1, 512]")
        with self._lock:
            self._check_open()
            native.set_threads(self._handle, n_threads, batch)

    def _check_open(self) -> None:
        if self._handle.closed:
            raise ClosedError("context")

    def close(self) -> None:
        """Stop what runs and free the context; idempotent."""
        self.abort()
        with self._lock:
            self._handle.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
