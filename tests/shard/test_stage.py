"""Stages alone and in a chain."""

from __future__ import annotations

import numpy as np
import pytest

from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.errors import (
    ContextError,
    InvalidParameterError,
    PositionError,
    RequestError,
    TokenError,
    UnknownParameterError,
    UnsupportedFileError,
)
from llamaherd.files.synthesize import synthesize
from llamaherd.shard.in_process import InProcessChain
from llamaherd.shard.opening import open_stages
from llamaherd.shard.pipeline import Pipeline
from llamaherd.shard.slices import SliceStore
from llamaherd.shard.stage import Stage

from .conftest import SETTINGS, conversation, equal

N = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("cuts", [(0, 1, 4, 6), (0, 6), (0, 2, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_a_chain_is_the_whole_bit_for_bit(make_whole, make_chain, unified, cuts):
    whole = conversation(make_whole(kv_unified=unified))
    chain = make_chain(cuts, kv_unified=unified)
    assert all(equal(whole, conversation(chain)))
    assert chain.memory.free_cells == chain.memory.n_cells


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen2", "mistral", "mixtral"])
def test_other_architectures(tmp_path, name):
    path = synthesize(tmp_path / "m.gguf", name, layers=6, n_ctx=1024)
    with Model.load(path) as model:
        whole = conversation(Context(model, **SETTINGS))
    store = SliceStore(tmp_path / "slices")
    stages = [Stage.load(path, a, b, store=store, **SETTINGS) for a, b in ((0, 2), (2, 3), (3, 6))]
    with Pipeline(InProcessChain(stages), Model.load(path, vocab_only=True)) as chain:
        assert all(equal(whole, conversation(chain)))


def test_a_stage_alone(six_layers, tmp_path):
    store = SliceStore(tmp_path)
    with (
        Stage.load(six_layers, 0, 3, store=store, **SETTINGS) as first,
        Stage.load(six_layers, 3, 6, store=store, **SETTINGS) as last,
    ):
        zeros = np.zeros(3, np.int32)
        assert first.memory.allocate() == last.memory.allocate() == 0
        hidden = first.forward(N, N, zeros)
        assert hidden.shape == (3, first.model.n_embd)
        logits = last.forward(hidden, N, zeros, np.array([False, False, True]))
        assert logits.shape == (1, last.model.vocabulary.n_tokens)
        assert first.facts.end == last.facts.start == 3
        with pytest.raises(RequestError, match="takes token ids"):
            first.forward(hidden, N + 3, zeros)
        with pytest.raises(RequestError, match="takes hidden states"):
            last.forward(N, N + 3, zeros)
        with pytest.raises(RequestError, match="shape"):
            last.forward(hidden[:, :-1], N + 3, zeros)
        with pytest.raises(PositionError):
            last.forward(hidden, N, zeros)
        with pytest.raises(TokenError):
            first.forward(N + 10**6, N + 3, zeros)
        for bad in (N.astype(np.int64) + 2**40, N + 0.7, np.array([None] * 3), N[:, None][None], "abc", None):
            with pytest.raises(RequestError, match=r"whole numbers|32 bits|token ids"):
                first.forward(bad, N + 3, zeros)
            with pytest.raises(RequestError, match=r"whole numbers|32 bits|token ids"):
                first.forward(N, bad, zeros)
        for outputs in ([True], np.ones((3, 1), bool)):
            with pytest.raises(RequestError, match="outputs"):
                first.forward(N, N + 3, zeros, outputs)
        with pytest.raises(RequestError, match="floats"):
            last.forward(hidden.astype(object), N + 3, zeros)
        with pytest.raises(RequestError, match="a row for each draw"):
            last.draw(logits, [None, None])
        assert first.memory.length(0) == 3
        first.forward([1, 2, 3], [3, 4, 5], [0, 0, 0])  # lists do as well


def test_slices_are_kept_and_found_by_content(six_layers, tmp_path):
    store = SliceStore(tmp_path / "slices")
    path, layers = store.slice(six_layers, 1, 3)
    made = path.stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(six_layers.read_bytes())
    assert store.slice(copy, 1, 3) == (path, layers)
    assert path.stat().st_mtime_ns == made
    with Stage.load(path, **SETTINGS) as stage:
        assert (stage.start, stage.end, stage.layers) == (1, 3, 6)
    with pytest.raises(InvalidParameterError, match=r"\(1, 3\)"):
        Stage.load(path, 0, 2, **SETTINGS)


def test_a_changed_model_is_another(tmp_path):
    store = SliceStore(tmp_path / "slices")
    path = synthesize(tmp_path / "a.gguf", "llama", layers=2)
    first = store.identity(path)
    synthesize(path, "llama", layers=2, seed=5)
    assert store.identity(path) != first


def test_what_cannot_be_cut_is_refused(six_layers, tmp_path):
    store = SliceStore(tmp_path / "slices")
    with pytest.raises(InvalidParameterError, match="the whole"):
        Stage.load(six_layers, store=store, **SETTINGS)
    for start, end in ((3, 9), (0.0, 3.0), ("0", "3"), (True, 3)):
        with pytest.raises(InvalidParameterError):
            Stage.load(six_layers, start, end, store=store, **SETTINGS)
    with pytest.raises(UnsupportedFileError, match="encoder"):
        Stage.load(synthesize(tmp_path / "t5.gguf", "t5"), 0, 1, store=store, **SETTINGS)


def test_stages_that_do_not_fit_together(six_layers, tmp_path):
    store = SliceStore(tmp_path / "slices")
    stages = [Stage.load(six_layers, a, b, store=store, **SETTINGS) for a, b in ((0, 2), (3, 6))]
    with Model.load(six_layers, vocab_only=True) as vocabulary:
        with pytest.raises(ContextError, match=r"\[3, 6\) of 6, where layer 2"):
            Pipeline(InProcessChain(stages), vocabulary)
        with pytest.raises(ContextError, match="end at layer 2 of 6"):
            Pipeline(InProcessChain(stages[:1]), vocabulary)
    for stage in stages:
        stage.close()


@pytest.mark.parametrize(
    ("stages", "settings", "kind"),
    [
        (2.0, {}, InvalidParameterError),
        ("2", {}, InvalidParameterError),
        (True, {}, InvalidParameterError),
        (2, {"model_params": 5}, InvalidParameterError),
        (2, {"model_params": {5: 1}}, InvalidParameterError),
        (2, {"model_params": {"progress": 1}}, UnknownParameterError),
        (2, {"activations": "f64"}, InvalidParameterError),
        (2, {"activations": None}, InvalidParameterError),
        (2, {"activations": ["f32"]}, InvalidParameterError),
        (2, {"start": 1}, UnknownParameterError),
        (2, {"n_ctx": "many"}, InvalidParameterError),
    ],
)
def test_settings_are_checked_before_anything_starts(six_layers, stages, settings, kind):
    with pytest.raises(kind):
        open_stages(six_layers, stages, **settings)


@pytest.mark.parametrize("path", [None, 5, b"x"])
def test_a_path_is_a_path(path):
    with pytest.raises(InvalidParameterError, match="path"):
        open_stages(path, 2)


def test_numbers_of_numpy_are_numbers(six_layers, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAHERD_SLICES", str(tmp_path))
    with open_stages(
        six_layers, np.int64(2), n_ctx=np.int32(512), model_params={"check_tensors": np.bool_(True)}
    ) as p:
        assert p.n_ctx == 512
