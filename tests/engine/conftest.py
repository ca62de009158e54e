import numpy as np
import pytest

from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path):
    with Model.load(tiny_model_path) as model:
        yield model


@pytest.fixture
def make_context(tiny_model):
    contexts = []

    def make(model=None, **params):
        params = {"n_ctx": 512, "n_seq_max": 8, "n_threads": 1, "n_threads_batch": 1} | params
        contexts.append(Context(model or tiny_model, **params))
        return contexts[-1]

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def make_batch():
    def make(tokens, sequence, position=0, outputs="last"):
        n = len(tokens)
        wanted = np.zeros(n, np.bool_)
        wanted[slice(None) if outputs == "all" else -1] = True
        return Batch(
            tokens=np.asarray(tokens, np.int32),
            positions=np.arange(position, position + n, dtype=np.int32),
            sequences=np.full(n, sequence, np.int32),
            outputs=wanted,
        )

    return make
