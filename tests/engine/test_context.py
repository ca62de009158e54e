"""The context against llama_cpp's own low-level calls, and everything that it refuses."""

import json
import threading
import time
import zlib

import numpy as np
import pytest
from llama_cpp import llama_cpp as L

from llamaherd.config import LoraConfig
from llamaherd.engine import state
from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch, Engine
from llamaherd.errors import (
    ClosedError,
    ContextError,
    DecodeAbortedError,
    InvalidParameterError,
    ModelNotFoundError,
    OutOfCellsError,
    OutOfSequencesError,
    PositionError,
    PromptTooLongError,
    RequestError,
    SequenceError,
    StateMismatchError,
    TokenError,
    UnknownParameterError,
    UnsupportedError,
)
from llamaherd.files.synthesize import synthesize

TOKENS = [1, 40, 41, 99, 7, 300, 12, 77, 8, 50]


class Oracle:
    """llama.cpp through llama_cpp's bindings alone."""

    def __init__(self, path, **params):
        self.model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
        struct = L.llama_context_default_params()
        for name, value in (
            {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "n_seq_max": 8} | params
        ).items():
            setattr(struct, name, value)
        struct.kv_unified = True
        self.context = L.llama_init_from_model(self.model, struct)
        self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
        self.batch = L.llama_batch_init(512, 0, 1)

    def decode(self, entries):
        """[(token, position, sequence)] -> logits of all."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = 1
        assert L.llama_decode(self.context, self.batch) == 0
        rows = [L.llama_get_logits_ith(self.context, i) for i in range(len(entries))]
        return np.stack([np.ctypeslib.as_array(r, shape=(self.n_vocab,)).copy() for r in rows])

    def fork(self, source, target):
        L.llama_memory_seq_cp(L.llama_get_memory(self.context), source, target, -1, -1)

    def close(self):
        L.llama_batch_free(self.batch)
        L.llama_free(self.context)
        L.llama_model_free(self.model)


@pytest.fixture
def oracle(tiny_model_path):
    made = Oracle(tiny_model_path)
    yield made
    made.close()


def test_logits_equal_llama_cpps_bit_for_bit(make_context, make_batch, oracle):
    context = make_context()
    assert isinstance(context, Engine)
    a = context.memory.allocate()
    ours = context.decode(make_batch(TOKENS, a, outputs="all"))
    assert np.array_equal(ours, oracle.decode([(t, i, 0) for i, t in enumerate(TOKENS)]))
    ours = context.decode(make_batch([5], a, 10))
    assert np.array_equal(ours, oracle.decode([(5, 10, 0)]))
    # forks, decoded together
    b, c = context.memory.fork(a), context.memory.fork(a)
    oracle.fork(0, 1)
    oracle.fork(0, 2)
    batch = Batch(
        tokens=np.array([6, 7, 8], np.int32),
        positions=np.full(3, 11, np.int32),
        sequences=np.array([a, b, c], np.int32),
        outputs=np.ones(3, np.bool_),
    )
    assert np.array_equal(context.decode(batch), oracle.decode([(6, 11, 0), (7, 11, 1), (8, 11, 2)]))


def test_a_restored_sequence_goes_on_bit_for_bit(make_context, make_batch, tmp_path):
    first, second = make_context(), make_context()
    a = first.memory.allocate()
    first.decode(make_batch(TOKENS, a))
    data = first.save_sequence(a, TOKENS)
    first.save_sequence_file(a, tmp_path / "state.bin", TOKENS)
    expected = first.decode(make_batch([9], a, 10)).copy()
    b = second.restore_sequence(data)
    assert second.memory.length(b) == 10
    assert np.array_equal(second.decode(make_batch([9], b, 10)), expected)
    c = second.restore_sequence_file(tmp_path / "state.bin")
    assert np.array_equal(second.decode(make_batch([9], c, 10)), expected)


def test_long_batches_are_split(make_context, make_batch):
    small, large = make_context(n_batch=64, n_ubatch=64), make_context(n_batch=512, n_ubatch=64)
    tokens = np.random.default_rng(1).integers(3, 300, 200)
    rows = [c.decode(make_batch(tokens, c.memory.allocate(), outputs="all")).copy() for c in (small, large)]
    assert rows[0].shape[0] == 200
    assert np.array_equal(*rows)


def test_wanted_rows_come_in_batch_order(make_context, make_batch):
    context = make_context()
    everything = context.decode(make_batch(TOKENS, context.memory.allocate(), outputs="all")).copy()
    batch = make_batch(TOKENS, context.memory.allocate())
    batch.outputs[[2, 5]] = True
    assert np.array_equal(context.decode(batch), everything[[2, 5, 9]])
    batch = make_batch(TOKENS, context.memory.allocate())
    batch.outputs[:] = False
    assert context.decode(batch).shape == (0, context.vocabulary.n_tokens)


def test_hidden_states_and_layers(make_context, make_batch, tiny_model):
    context = make_context(layer_outputs=True)
    last = tiny_model.n_layer - 1
    outputs = context.run(
        make_batch(TOKENS, context.memory.allocate(), outputs="all"), hidden=True, layers=[0, last]
    )
    assert outputs.logits.shape == (10, context.vocabulary.n_tokens)
    assert (
        outputs.hidden.shape
        == outputs.layers[0].shape
        == outputs.layers[last].shape
        == (10, tiny_model.n_embd)
    )
    # the final norm is an RMS norm with weight: check it by hand, from the last layer's output
    weight = norm_weight(tiny_model.path)
    x = outputs.layers[last].astype(np.float64)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    assert np.allclose(outputs.hidden, expected, atol=1e-3)
    plain = make_context()
    logits = plain.decode(make_batch(TOKENS, plain.memory.allocate(), outputs="all"))
    assert np.allclose(logits, outputs.logits, atol=1e-4)
    with pytest.raises(UnsupportedError, match="layer_outputs"):
        plain.run(make_batch([1], plain.memory.allocate()), layers=[0])
    with pytest.raises(InvalidParameterError):
        context.run(make_batch([1], context.memory.allocate()), layers=[99])


def norm_weight(path):
    from llamaherd import files

    with files.open(path) as file:
        return file.tensors["output_norm.weight"].dequantize().astype(np.float64)


def test_input_embeddings_equal_tokens(make_context, make_batch, tiny_model):
    from llamaherd import files

    with files.open(tiny_model.path) as file:
        table = file.tensors["token_embd.weight"].dequantize()
    context = make_context()
    by_token = context.decode(make_batch(TOKENS, context.memory.allocate())).copy()
    n = len(TOKENS)
    batch = make_batch(TOKENS, context.memory.allocate())
    embeddings = Batch(
        None, batch.positions, batch.sequences, batch.outputs, table[TOKENS].astype(np.float32)
    )
    assert np.allclose(context.decode(embeddings), by_token, atol=1e-4)
    with pytest.raises(RequestError, match="shape"):
        context.decode(
            Batch(None, batch.positions + n, batch.sequences, batch.outputs, np.zeros((n, 3), np.float32))
        )


# ------------------------------------------------------------------------------------- embeddings


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    with Model.load(synthesize(tmp_path_factory.mktemp("bert") / "b.gguf", "bert")) as model:
        yield model


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_embeddings_do_not_depend_on_what_is_embedded_beside(kind, bert, tiny_model, make_context):
    model = bert if kind == "bert" else tiny_model
    params = {"embeddings": True, "pooling_type": "mean"} if kind == "bert" else {}
    context = make_context(model, n_ctx=128, n_batch=128, n_ubatch=128, **params)
    texts = [[1, 5, 9], [1, 7], list(range(20, 60)), [1, 5, 9], *[[3, k] for k in range(20)]]
    together = context.embed(texts)
    assert together.shape == (24, model.n_embd)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([context.embed([t]) for t in texts])
    assert np.allclose(together, alone, atol=1e-4)
    assert not np.allclose(together[0], together[1], atol=1e-2)
    assert context.memory.used_cells == 0
    with pytest.raises(PromptTooLongError):
        context.embed([[1] * 129])
    with pytest.raises(RequestError):
        context.embed([[]])


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("token", [-1, 10**6])
def test_token_ids_out_of_range(make_context, make_batch, token):
    context = make_context()
    with pytest.raises(TokenError) as error:
        context.decode(make_batch([1, token, 2], context.memory.allocate()))
    assert (error.value.token, error.value.index) == (token, 1)
    assert context.memory.used_cells == 0


def test_positions_that_do_not_continue(make_context, make_batch):
    context = make_context()
    a = context.memory.allocate()
    for position in (-1, 1, 10**6):
        with pytest.raises(PositionError):
            context.decode(make_batch([1], a, position))
    context.decode(make_batch([1], a, 0))
    with pytest.raises(PositionError, match="goes on at 1"):
        context.decode(make_batch([1], a, 0))


def test_sequences_that_are_not_in_use(make_context, make_batch):
    context = make_context()
    for sequence in (-1, 3, 8, 10**6):
        with pytest.raises(SequenceError):
            context.decode(make_batch([1], sequence))
        for call in (
            context.memory.release,
            context.memory.fork,
            context.memory.length,
            context.save_sequence,
        ):
            with pytest.raises(SequenceError):
                call(sequence)


def test_batches_that_are_none(make_context):
    context = make_context()
    empty = np.empty(0, np.int32)
    with pytest.raises(RequestError):
        context.decode(Batch(empty, empty, empty, empty.astype(np.bool_)))
    one = np.zeros(1, np.int32)
    with pytest.raises(RequestError):
        context.decode(Batch(np.zeros(2, np.int32), one, one, one.astype(np.bool_)))


def test_sequences_and_cells_run_out(make_context, make_batch):
    context = make_context(n_ctx=256, n_seq_max=2)
    a = context.memory.allocate()
    context.memory.allocate()
    with pytest.raises(OutOfSequencesError) as sequences:
        context.memory.allocate()
    assert sequences.value.limit == 2
    context.decode(make_batch([1] * 250, a))
    with pytest.raises(OutOfCellsError) as cells:
        context.decode(make_batch([1] * 7, 1))
    assert (cells.value.used, cells.value.limit) == (250, 256)
    assert context.decode(make_batch([1] * 6, a, 250)).shape[0] == 1


def test_parameters(tiny_model, make_context):
    with pytest.raises(UnknownParameterError) as error:
        make_context(n_batsh=3)
    assert error.value.nearest == "n_batch"
    for name, value in [
        ("n_seq_max", 0), ("n_seq_max", 257), ("n_ctx", -1), ("n_ctx", "x"), ("n_batch", 0), ("n_threads", 0),
        ("type_k", "q9"), ("flash_attn_type", 77), ("kv_unified", 1), ("rope_freq_base", "x"),
        ("n_batch", 2**40),
    ]:  # fmt: skip
        with pytest.raises(InvalidParameterError) as invalid:
            make_context(**{name: value})
        assert invalid.value.name == name
    with pytest.raises(InvalidParameterError, match="n_batch"):
        make_context(n_seq_max=64, n_batch=32)
    with pytest.raises(ContextError, match="GiB"):
        make_context(n_ctx=2**31 - 1)
    with pytest.raises(ContextError):
        make_context(flash_attn_type="disabled", type_v="q8_0")
    for name, value in [("type_k", "bf16"), ("flash_attn_type", "enabled"), ("rope_scaling_type", "none")]:
        make_context(**{name: value})


def test_states_that_do_not_belong(make_context, make_batch, tmp_path, tmp_path_factory):
    context = make_context()
    a = context.memory.allocate()
    context.decode(make_batch(TOKENS, a))
    data = context.save_sequence(a)
    for bad in (b"", b"x" * 40, data[:-1], data[:60], data[:-1] + bytes([data[-1] ^ 1]), data + b"x"):
        with pytest.raises(StateMismatchError):
            context.restore_sequence(bad)
    other = synthesize(tmp_path / "other.gguf", "llama", layers=3)
    with Model.load(other) as model, pytest.raises(StateMismatchError, match=r"n_params|description"):
        make_context(model).restore_sequence(data)
    with pytest.raises(StateMismatchError, match="type_k"):
        make_context(type_k="f32").restore_sequence(data)
    with pytest.raises(StateMismatchError, match="cannot be read"):
        context.restore_sequence_file(tmp_path / "none")
    assert context.memory.free_sequences == 7


def test_use_after_close(tiny_model_path, make_batch):
    model = Model.load(tiny_model_path)
    context = Context(model, n_ctx=256, n_threads=1)
    a = context.memory.allocate()
    model.close()
    model.close()
    for call in (
        lambda: context.decode(make_batch([1], a)),
        context.memory.allocate,
        lambda: context.memory.release(a),
        lambda: context.set_threads(1),
        lambda: Context(model),
        lambda: model.chat_template(),
    ):
        with pytest.raises(ClosedError):
            call()
    context.close()


def test_many_threads_on_one_context(make_context, make_batch):
    context = make_context()
    expected = context.decode(make_batch(TOKENS, context.memory.allocate())).copy()
    context.memory.clear()
    failures = []

    def work():
        for _ in range(20):
            sequence = context.memory.allocate()
            with context._lock:  # the view is valid until anybody's next decode
                logits = context.decode(make_batch(TOKENS, sequence)).copy()
            context.memory.release(sequence)
            if not np.allclose(logits, expected, atol=1e-2):
                failures.append(np.abs(logits - expected).max())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert context.memory.used_cells == 0


def test_abort_stops_a_decode_and_loses_nothing(tmp_path, make_context, make_batch):
    path = synthesize(tmp_path / "slow.gguf", "llama", layers=8, n_embd=512, n_heads=8, n_ctx=4096, n_ff=2048)
    with Model.load(path) as model:
        context = make_context(model, n_ctx=4096, n_batch=4096)
        a = context.memory.allocate()
        context.decode(make_batch(TOKENS, a))
        expected = context.decode(make_batch([5], a, 10)).copy()
        context.memory.trim(a, 10)
        stop = threading.Timer(0.05, context.abort)
        stop.start()
        started = time.monotonic()
        with pytest.raises(DecodeAbortedError):
            context.decode(make_batch([1] * 3000, a, 10))
        assert time.monotonic() - started < 20
        assert context.memory.length(a) == 10
        assert np.array_equal(context.decode(make_batch([5], a, 10)), expected)
        context.close()


# ------------------------------------------------------------------------------------------ models


def test_a_model_tells_about_itself(tiny_model):
    assert tiny_model.architecture == "llama"
    assert tiny_model.n_layer == 2
    assert tiny_model.n_ctx_train == 512
    assert tiny_model.n_params > 0
    assert tiny_model.size > 0
    assert not tiny_model.is_recurrent


def test_loading_reports_progress_and_can_be_stopped(tiny_model_path):
    from llamaherd.errors import ModelLoadError

    shares = []
    with Model.load(tiny_model_path, progress=shares.append):
        assert shares[-1] == 1
        assert shares == sorted(shares)
    with pytest.raises(ModelLoadError, match="stopped"):
        Model.load(tiny_model_path, progress=lambda share: False)

    def fail(share):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Model.load(tiny_model_path, progress=fail)


def test_model_parameters(tiny_model_path):
    with pytest.raises(UnknownParameterError) as error:
        Model.load(tiny_model_path, n_gpu_layer=3)
    assert error.value.nearest == "n_gpu_layers"
    with pytest.raises(InvalidParameterError):
        Model.load(tiny_model_path, n_gpu_layers="many")
    with pytest.raises(InvalidParameterError):
        Model.load(tiny_model_path, tensor_split=[0.5] * 1000)
    with pytest.raises(InvalidParameterError):
        Model.load(tiny_model_path, kv_overrides={"x": object()})
    overrides = {"llama.context_length": 4321}
    with Model.load(tiny_model_path, kv_overrides=overrides, n_gpu_layers=3, use_extra_bufts=False) as model:
        assert model.n_ctx_train == 4321


def test_missing_adapters(tiny_model_path, tmp_path):
    with pytest.raises(ModelNotFoundError):
        Model.load(tiny_model_path, loras=[LoraConfig(str(tmp_path / "none.gguf"))])


# ------------------------------------------------------------------------------------------ memory


def test_forks_share_their_cells_and_go_their_own_way(make_context, make_batch):
    context = make_context()
    memory = context.memory
    a = memory.allocate()
    context.decode(make_batch(TOKENS, a))
    b = memory.fork(a, 6)
    assert (memory.length(b), memory.used_cells, memory.own_cells(a)) == (6, 10, 4)
    forked = context.decode(make_batch(TOKENS[6:], b, 6)).copy()
    memory.trim(a, 6)
    assert np.allclose(context.decode(make_batch(TOKENS[6:], a, 6)), forked, atol=1e-4)
    for bad in (-1, 11):
        with pytest.raises(PositionError):
            memory.fork(a, bad)
        with pytest.raises(PositionError):
            memory.trim(a, bad)
    memory.clear()
    assert (memory.used_cells, memory.free_sequences) == (0, 8)


def test_a_split_cache_gives_each_sequence_its_own(make_context, make_batch):
    context = make_context(kv_unified=False, n_ctx=1024, n_seq_max=4)
    assert context.n_ctx == 256
    memory = context.memory
    a = memory.allocate()
    context.decode(make_batch(TOKENS, a))
    b = memory.fork(a, 6)
    assert memory.used_cells == 16
    forked = context.decode(make_batch(TOKENS[6:], b, 6)).copy()
    c = memory.allocate()
    assert np.allclose(context.decode(make_batch(TOKENS, c)), forked, atol=1e-3)


def test_shifting_moves_one_sequence_and_no_other(make_context, make_batch):
    context = make_context()
    memory = context.memory
    a = memory.allocate()
    context.decode(make_batch(TOKENS, a))
    b = memory.fork(a)
    before = context.decode(make_batch([5], b, 10)).copy()
    memory.trim(b, 10)
    memory.shift(a, keep=2, discard=3)
    assert memory.length(a) == 7
    assert np.array_equal(context.decode(make_batch([5], b, 10)), before)
    # the shifted sequence sees its tokens at their new positions: as if they had been put there
    c = memory.allocate()
    kept = TOKENS[:2] + TOKENS[5:]
    context.decode(make_batch(kept, c))
    shifted = context.decode(make_batch([5], a, 7)).copy()
    fresh = context.decode(make_batch([5], c, 7))
    assert np.corrcoef(shifted[0], fresh[0])[0, 1] > 0.5
    with pytest.raises(PositionError):
        memory.shift(a, keep=5, discard=10)


def test_recurrent_states_cannot_be_cut(tmp_path, make_context, make_batch):
    with Model.load(synthesize(tmp_path / "mamba.gguf", "mamba")) as model:
        assert model.is_recurrent
        context = make_context(model)
        memory = context.memory
        a = memory.allocate()
        context.decode(make_batch(TOKENS, a))
        b = memory.fork(a)
        expected = context.decode(make_batch([5], a, 10)).copy()
        assert np.allclose(context.decode(make_batch([5], b, 10)), expected, atol=1e-5)
        with pytest.raises(PositionError, match="recurrent"):
            memory.trim(a, 4)
        with pytest.raises(UnsupportedError):
            memory.shift(a, keep=1, discard=2)
        memory.trim(a, 0)
        assert memory.length(a) == 0
        context.close()


@pytest.mark.parametrize("kv_unified", [True, False])
def test_states_saved_before_llama_cpp_has_copied_and_shifted(make_context, make_batch, kv_unified):
    tokens = np.random.default_rng(0).integers(3, 300, 60).tolist()

    def begin():
        context = make_context(kv_unified=kv_unified, n_ctx=1024, n_seq_max=4)
        sequence = context.memory.allocate()
        context.decode(make_batch(tokens, sequence))
        return context, sequence

    def go_on(context, sequence):
        batch = make_batch([9], sequence, context.memory.length(sequence))
        return context.decode(batch)[0].copy()

    expected = go_on(*begin())
    context, sequence = begin()
    saved = context.save_sequence(context.memory.fork(sequence))
    assert np.allclose(go_on(context, context.restore_sequence(saved)), expected, atol=0.05)

    context, sequence = begin()  # the lowest free id is the one that was copied from
    other = context.memory.allocate()
    context.decode(make_batch(tokens[::-1], other))
    saved = context.save_sequence(other)
    context.memory.release(other)
    fork = context.memory.fork(sequence)
    context.memory.release(sequence)
    assert context.restore_sequence(saved) == sequence
    assert np.allclose(go_on(context, fork), expected, atol=0.05)

    context, sequence = begin()
    context.memory.shift(sequence, 4, 20)
    saved = context.save_sequence(sequence)
    restored = context.restore_sequence(saved)
    assert np.allclose(go_on(context, restored), go_on(context, sequence), atol=0.05)


def test_shifting_twice_a_fork_in_between(make_context, make_batch):
    tokens = np.random.default_rng(0).integers(3, 300, 60).tolist()
    context = make_context(n_ctx=1024)
    a, b = context.memory.allocate(), context.memory.allocate()
    for sequence in (a, b):
        context.decode(make_batch(tokens, sequence))
        context.memory.shift(sequence, 4, 20)
    fork = context.memory.fork(a)
    for sequence in (fork, b):
        context.memory.shift(sequence, 4, 10)
    rows = [context.decode(make_batch([9], s, 30))[0].copy() for s in (fork, b)]
    assert np.allclose(*rows, atol=0.05)


def test_a_pruned_window_cannot_be_cut(tmp_path, make_batch):
    tokens = np.random.default_rng(0).integers(3, 300, 900).tolist()
    params = {"n_ctx": 2048, "n_ubatch": 32, "n_threads": 1, "n_seq_max": 2, "swa_full": False}
    with Model.load(synthesize(tmp_path / "gemma.gguf", "gemma3")) as model:
        with pytest.raises(InvalidParameterError, match="kv_unified"):
            Context(model, **params)
        context = Context(model, kv_unified=False, **params)
        sequence = context.memory.allocate()
        context.decode(make_batch(tokens, sequence))
        for cut in (context.memory.fork, context.memory.trim):
            with pytest.raises(PositionError):
                cut(sequence, 300)
        fork = context.memory.fork(sequence)
        rows = [context.decode(make_batch([9], s, 900))[0].copy() for s in (fork, sequence)]
        assert np.allclose(*rows, atol=1e-3)


def test_outputs_outlive_the_context(tiny_model_path, make_batch):
    model = Model.load(tiny_model_path)
    context = Context(model, n_ctx=256, n_threads=1)
    row = context.decode(make_batch([5, 6], context.memory.allocate()))
    expected = row.copy()
    model.close()
    assert np.array_equal(row, expected)


def test_a_vocabulary_in_use_outlives_close(tiny_model_path):
    model = Model.load(tiny_model_path)
    vocabulary, failures = model.vocabulary, []

    def work():
        try:
            while True:
                vocabulary.encode("some text " * 2000)
        except ClosedError:
            return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    model.close()
    for thread in threads:
        thread.join(20)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_encoders_do_not_decode(tmp_path, make_batch, architecture):
    with Model.load(synthesize(tmp_path / "encoder.gguf", architecture)) as model:
        context = Context(model, n_ctx=256, n_threads=1, n_seq_max=2)
        assert not context.generates
        with pytest.raises(UnsupportedError):
            context.decode(make_batch([5, 6], context.memory.allocate()))
        if architecture == "bert":
            assert context.embed([[5, 6, 7]]).any()
        else:
            with pytest.raises(UnsupportedError):
                context.embed([[5, 6, 7]])


def test_a_model_without_weights_makes_no_context(tiny_model_path):
    with Model.load(tiny_model_path, vocab_only=True) as model:
        assert model.vocabulary.encode("a")
        with pytest.raises(UnsupportedError, match="vocab_only"):
            Context(model)


def test_more_outputs_than_the_context_has_room_for(make_context, make_batch):
    context = make_context(n_outputs_max=8)
    sequence = context.memory.allocate()
    with pytest.raises(RequestError, match="n_outputs_max"):
        context.decode(make_batch([5] * 20, sequence, outputs="all"))
    assert context.decode(make_batch([5] * 20, sequence)).shape[0] == 1


@pytest.mark.parametrize("sequence", ["x", None, 1.0, True, [], 10**30])
def test_sequence_ids_of_the_wrong_kind(make_context, sequence):
    memory = make_context().memory
    first, second = memory.allocate(), memory.allocate()
    for call in (memory.length, memory.fork, memory.release, lambda s: memory.trim(s, 0)):
        with pytest.raises(SequenceError):
            call(sequence)
    assert memory.live == {first, second}


@pytest.mark.parametrize("length", ["x", 1.5, True, 10**30, -1])
def test_lengths_of_the_wrong_kind_leak_nothing(make_context, make_batch, length):
    context = make_context()
    memory, sequence = context.memory, context.memory.allocate()
    context.decode(make_batch([5, 6, 7], sequence))
    for call in (
        lambda: memory.fork(sequence, length),
        lambda: memory.trim(sequence, length),
        lambda: memory.shift(sequence, 0, length),
        lambda: memory.shift(sequence, length, 0),
    ):
        with pytest.raises(PositionError):
            call()
    assert (memory.free_sequences, memory.length(sequence)) == (7, 3)


@pytest.mark.parametrize("texts", [[["x"]], [[1.5]], [[10**30]], ["ab"], [None], None, 5])
def test_texts_to_embed_of_the_wrong_kind(make_context, texts):
    with pytest.raises((RequestError, InvalidParameterError)):
        make_context().embed(texts)


def _envelope(header, payload):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    checksum = zlib.crc32(payload, zlib.crc32(data))
    return state._HEAD.pack(state._MAGIC, len(data), len(payload), checksum) + data + payload


@pytest.mark.parametrize(
    "change",
    [
        {"length": -5},
        {"length": 3},  # fewer than there are
        {"length": 41},
        {"length": 10**30},
        {"length": "40"},
        {"tokens": 5},
        {"tokens": ["x"]},
        {"for": 5},
        None,
        [1],
        b"{nope",
        b"\xff",
    ],
)
def test_states_with_a_header_that_lies(make_context, make_batch, change):
    context = make_context()
    sequence = context.memory.allocate()
    context.decode(make_batch([5] * 40, sequence))
    payload = state.unpack(context.save_sequence(sequence), context._fingerprint()).payload
    header = {"for": context._fingerprint(), "length": 40, "tokens": []}
    lie = header | change if isinstance(change, dict) else change
    with pytest.raises((StateMismatchError, OutOfCellsError)):
        context.restore_sequence(_envelope(lie, payload))
    assert (context.memory.free_sequences, context.memory.used_cells) == (7, 40)
    assert context.restore_sequence(_envelope(header, payload)) == 1


def test_states_of_a_context_that_turns_positions_otherwise(make_context, make_batch):
    context = make_context()
    sequence = context.memory.allocate()
    context.decode(make_batch([5] * 10, sequence))
    saved = context.save_sequence(sequence)
    with pytest.raises(StateMismatchError, match="rope"):
        make_context(rope_freq_base=5000.0).restore_sequence(saved)
    make_context(type_k="F16", type_v=1).restore_sequence(saved)  # the same types by other names


def test_a_divided_cache_of_an_encoder_decoder_model_is_refused(tmp_path):
    """llama.cpp would abort while it makes the context."""
    with Model.load(synthesize(tmp_path / "t5.gguf", "t5")) as model:
        with pytest.raises(InvalidParameterError, match="kv_unified"):
            Context(model, n_seq_max=4, kv_unified=False)
        Context(model, n_seq_max=4)
