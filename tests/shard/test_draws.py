"""Tokens drawn on the last stage are those drawn beside the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from llamaherd import Herd
from llamaherd.config import SamplingConfig
from llamaherd.engine.context import Context
from llamaherd.engine.picks import is_memoryless
from llamaherd.engine.protocol import Batch, Draw, Pick, Row
from llamaherd.errors import LogitsError, RequestError
from llamaherd.shard.draws import pack_draws, pack_picks, unpack_draws, unpack_picks
from llamaherd.shard.opening import open_stages
from llamaherd.shard.pipeline import Pipeline
from llamaherd.shard.stage import Stage
from llamaherd.types import GenerationRequest, Token

from .conftest import SETTINGS

MEMORYLESS = [
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=0.9, seed=3),
    SamplingConfig(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=4),
    SamplingConfig(typical_p=0.7, top_n_sigma=1.5, dynatemp_range=0.3, seed=5),
    SamplingConfig(logit_bias={7: -float("inf"), 9: 4.0}, seed=6),
]
WITH_MEMORY = [
    SamplingConfig(repeat_penalty=1.3, seed=7),
    SamplingConfig(dry_multiplier=0.8, seed=8),
    SamplingConfig(mirostat=2, seed=9),
    SamplingConfig(xtc_probability=0.5, seed=10),
    SamplingConfig(grammar="root ::= [a-z ]+", seed=11),
    SamplingConfig(json_schema='{"type": "integer"}', seed=12),
]


class Watched(Pipeline):
    """Counts what came of wanted tokens."""

    picks = logits = 0

    def collect(self, ticket):
        rows = super().collect(ticket)
        picks = sum(isinstance(row, Pick) for row in rows)
        self.picks += picks
        self.logits += len(rows) - picks
        return rows


@pytest.fixture(scope="module")
def watched(six_layers, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMAHERD_SLICES", str(tmp_path_factory.getbasetemp() / "slices"))
        pipeline = open_stages(six_layers, 2, **SETTINGS, kv_unified=False)
    pipeline.__class__ = Watched
    with Herd(pipeline, max_sequences=6, prefix_cache=False) as herd:
        yield herd, pipeline


@pytest.mark.parametrize("sampling", MEMORYLESS + WITH_MEMORY)
def test_texts_and_logprobs_are_those_of_one_process(watched, make_whole, sampling):
    herd, pipeline = watched
    whole: Context = make_whole(kv_unified=False)
    with Herd(whole, max_sequences=6, prefix_cache=False) as alone:
        expected = _listed(alone, sampling)
    pipeline.picks = pipeline.logits = 0
    assert _listed(herd, sampling) == expected
    if is_memoryless(sampling):
        assert pipeline.logits == 3  # after each prompt, for its candidates to share
        assert pipeline.picks >= 3 * 3 * 11 - 60
    else:
        assert pipeline.picks == 0


def _listed(herd: Herd, sampling: SamplingConfig) -> list[object]:
    """Every token of every candidate, by request and candidate."""
    found: list[object] = []
    for text, top in (("one", 0), ("two", 1), ("three", 4)):
        request = GenerationRequest(
            text, max_tokens=12, n=3, logprobs=top, ignore_eos=top == 1, sampling=sampling
        )
        tokens = [e for e in herd.stream(request) if isinstance(e, Token)]
        found += [
            [(e.token, e.text, e.logprob, e.top_logprobs) for e in tokens if e.index == i] for i in range(3)
        ]
    return found


def test_which_settings_need_the_text_so_far():
    assert all(map(is_memoryless, MEMORYLESS))
    assert not any(map(is_memoryless, WITH_MEMORY))
    assert is_memoryless(SamplingConfig(repeat_penalty=1.3, penalty_last_n=0))


def test_a_row_that_is_nobody_s_fails_alone(six_layers):
    with Stage.load(six_layers, 0, 6, **SETTINGS) as stage:
        logits = np.random.default_rng(1).normal(size=(4, stage.facts.n_vocab)).astype(np.float32)
        logits[1, 5] = np.nan
        greedy = Draw(SamplingConfig(temperature=0), 0.5, top=2)
        forbidding = Draw(SamplingConfig(logit_bias=dict.fromkeys(range(logits.shape[1]), -np.inf)), 0.5)
        rows = stage.draw(logits.copy(), [greedy, greedy, None, forbidding])
    assert isinstance(rows[0], Pick)
    assert rows[0].token == logits[0].argmax()
    assert [t for t, _ in rows[0].top] == list(np.argsort(-logits[0])[:2])
    assert isinstance(rows[1], LogitsError)
    assert np.array_equal(rows[2], logits[2])
    assert isinstance(rows[3], RequestError)


def test_rows_survive_the_wire():
    logits = np.arange(12, dtype=np.float32).reshape(2, 6)
    rows: list[Row] = [
        logits[0],
        Pick(3, -0.25, ((3, -0.25), (1, -2.0)), True),
        LogitsError("NaN"),
        logits[1],
    ]
    packed, left = pack_picks(rows)
    back = unpack_picks(packed, left)
    assert np.array_equal(back[0], logits[0])
    assert np.array_equal(back[3], logits[1])
    assert back[1] == rows[1]
    assert isinstance(back[2], LogitsError)
    assert str(back[2]) == str(rows[2])


def test_draws_survive_the_wire():
    a, b = SamplingConfig(temperature=0, logit_bias={3: -np.inf, 1: 0.5}), SamplingConfig(seed=1)
    draws = (Draw(a, 0.25, 3, (1, 2)), None, Draw(b, 0.5), Draw(a, 0.75))
    assert unpack_draws(pack_draws(draws)) == draws
    assert pack_draws(None) == b""
    assert unpack_draws(b"") is None


def test_draws_of_a_batch_that_is_computed_in_parts(six_layers, make_chain):
    chain = make_chain(n_batch=32)
    sequence = chain.memory.allocate()
    outputs = np.zeros(80, np.bool_)
    outputs[[3, 40, 41, 79]] = True
    greedy = Draw(SamplingConfig(temperature=0), 0.0)
    draws = tuple(greedy if i in (40, 79) else None for i in range(80))
    tokens, positions = np.arange(80, dtype=np.int32), np.arange(80, dtype=np.int32)
    sequences = np.full(80, sequence, np.int32)
    rows = chain.collect(chain.submit(Batch(tokens, positions, sequences, outputs, draws=draws)))
    chain.memory.trim(sequence, 0)
    logits = chain.decode(Batch(tokens, positions, sequences, outputs, draws=draws))
    assert [isinstance(row, Pick) for row in rows] == [False, True, False, True]
    assert [row.token for row in (rows[1], rows[3])] == logits[[1, 3]].argmax(-1).tolist()
    assert np.array_equal(rows[0], logits[0])
    assert np.array_equal(rows[2], logits[2])
