"""Attention of every level against float64 and stock llama.cpp; bitwise the same in any batch and any cache."""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from llamaherd_kernels import ggml as graphs
from llamaherd_kernels.library import available_levels, levels
from tests.kernels.attention_reference import attend, inputs, reference
from tests.kernels.test_enabling import needs_level, run

HERE = [*available_levels(), *(name for name in levels() if name.startswith("emulated"))]
MASKS = ("none", "causal", "window", "prompt and own", "apart", "random", "per head")


@pytest.fixture(scope="module")
def ggml():
    return graphs.bind()


def root_mean_square(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "types", [("F16", "F16"), ("Q8_0", "Q8_0"), ("F32", "F32"), ("BF16", "F16"), ("F16", "Q8_0")]
)
def test_attention_is_that_of_float64(ggml, level, kind, types):
    x = inputs(kind, types=types)
    error = attend(ggml, level, x, threads=2) - reference(ggml, x)
    assert np.abs(error).max() < 1e-5
    assert root_mean_square(error) < 1e-6 * 0.5


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize(
    "shape",
    [
        {"columns": (80, 80), "heads": (3, 3)},
        {"columns": (96, 96)},
        {"columns": (128, 128), "heads": (8, 2)},
        {"columns": (256, 256), "heads": (4, 1)},
        {"columns": (72, 40), "streams": 2},
        {"columns": (8, 8), "heads": (5, 5)},
        {"columns": (32, 64), "heads": (71, 1), "tokens": 5},
        {"tokens": 1, "cells": 700},
        {"tokens": 200, "cells": 200},
        {"tokens": 3, "cells": 17},
        {"max_bias": 8.0},
        {"max_bias": 3.0, "heads": (9, 3), "kind": "window"},
        {"cap": 30.0},
        {"cap": 2.0, "max_bias": 8.0, "kind": "random"},
        {"sinks": np.array([-3, 0, 1, 30, -np.inf, 2], np.float32)},
        {"sinks": np.arange(6, dtype=np.float32), "kind": "none"},
        {"scale": 4.0},
    ],
    ids=str,
)
def test_shapes_and_numbers(ggml, level, shape):
    x = inputs(**shape)
    error = attend(ggml, level, x, threads=3) - reference(ggml, x)
    # scores of hundreds have rounding errors of their own
    assert np.abs(error).max() < (1e-5 if x.scale < 1 else 5e-4)


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("kind", MASKS)
def test_a_token_is_bitwise_the_same_in_any_batch_and_on_any_threads(ggml, level, kind):
    x = inputs(kind, tokens=41, cells=600, max_bias=8.0 if kind == "causal" else 0.0)
    whole = attend(ggml, level, x)
    for threads in (2, 3, 7):
        assert np.array_equal(attend(ggml, level, x, threads), whole)
    for count in (1, 2, 5, 8, 16, 33):
        for start in {0, (41 - count) // 2, 41 - count}:
            here = slice(start, start + count)
            assert np.array_equal(attend(ggml, level, x.of(here), 1 + count % 3), whole[:, here]), (
                count,
                start,
            )
    shuffled = np.random.default_rng(1).permutation(41)
    assert np.array_equal(attend(ggml, level, x.of(shuffled), 2), whole[:, shuffled])


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("kind", MASKS[1:])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 6e4])
def test_where_cells_lie_and_what_closed_cells_hold_changes_nothing(ggml, level, kind, rubbish):
    """The cells of a sequence in order, but anywhere in a cache, among cells of others."""
    x = inputs(kind, tokens=20, cells=330)
    whole = attend(ggml, level, x)
    for wider in (331, 512, 900):
        places = np.sort(np.random.default_rng(wider).permutation(wider)[:330])
        if wider == 512:
            places = np.arange(330) + 100  # as they were, further back
        cache = {}
        for name in ("k", "v"):
            values = getattr(x, name)
            cache[name] = np.full((1, wider, *values.shape[2:]), rubbish, np.float32)
            cache[name][:, places] = values
        mask = np.full((*x.mask.shape[:3], wider), -np.inf, np.float16)
        mask[..., places] = x.mask
        moved = dataclasses.replace(x, **cache, mask=mask)
        assert np.array_equal(attend(ggml, level, moved, threads=2), whole), wider
    # what one token may not see, another may: it spoils the one alone
    for name in ("k", "v"):
        spoilt = getattr(x, name).copy()
        spoilt[:, 40] = rubbish
        out = attend(ggml, level, dataclasses.replace(x, **{name: spoilt}), threads=1)
        blind = np.isneginf(x.mask[0, :, :, 40]).all(0)
        assert np.array_equal(out[:, blind], whole[:, blind]), name
        if kind in ("causal", "random") and not np.isfinite(rubbish):
            assert not np.isfinite(out[:, ~blind]).all(), name


@pytest.mark.parametrize("level", HERE)
def test_what_is_not_a_number_stays_visible_and_in_its_row(ggml, level):
    x = inputs("causal", tokens=9)
    whole = attend(ggml, level, x)
    q = x.q.copy()
    q[0, 4, 1, 7] = np.nan
    out = attend(ggml, level, dataclasses.replace(x, q=q))
    assert np.isnan(out[0, 4, 1]).all()
    out[0, 4, 1] = whole[0, 4, 1]
    assert np.array_equal(out, whole)
    mask = x.mask.copy()
    mask[0, 0, 3, 100] = np.nan
    out = attend(ggml, level, dataclasses.replace(x, mask=mask))
    assert np.isnan(out[0, 3]).all()
    out[0, 3] = whole[0, 3]
    assert np.array_equal(out, whole)


@pytest.mark.parametrize("level", HERE)
def test_a_token_that_sees_nothing_is_zero(ggml, level):
    for sinks in (None, np.ones(6, np.float32)):
        x = inputs("causal", sinks=sinks)
        assert not attend(ggml, level, x)[0, 2].any()


@pytest.mark.parametrize("level", HERE)
def test_other_kinds_are_refused(ggml, level):
    assert attend(ggml, level, inputs(columns=(60, 64))) is None
    assert attend(ggml, level, inputs(columns=(1032, 64), cells=40, tokens=2)) is None


STOCK = """
    import json, sys
    import numpy as np
    from llamaherd_kernels import ggml as graphs
    from llamaherd_kernels.library import CACHE_TYPES, load
    sys.path.insert(0, {folder!r})
    from attention_reference import inputs, reference

    ggml = graphs.bind()
    assert not load().llamaherd_kernels_install(ggml._handle, {level!r}.encode(), 0, 1)
    found = []
    for case in {cases!r}:
        factor = case.pop("factor", 1.0)
        spikes = case.pop("spikes", False)
        case["sinks"] = np.array(case["sinks"], np.float32) if "sinks" in case else None
        x = inputs(**case)
        x.q *= factor
        if spikes:
            x.q[:, :, :, ::17] *= 30
            x.v[:, ::11] *= 300
        exact = reference(ggml, x)
        errors = []
        for ours in (0, 1):
            load().llamaherd_kernels_take_attention(ours)
            op = graphs.Attention(
                ggml, tuple(CACHE_TYPES[kind] for kind in x.types),
                (x.q.shape[0], x.q.shape[1], x.q.shape[2], x.k.shape[2], x.k.shape[1]), (x.k.shape[3], x.v.shape[3]),
                mask=None if x.mask is None else x.mask.shape[:2], scale=x.scale, max_bias=x.max_bias, cap=x.cap,
                sinks=x.sinks is not None, threads=2,
            )
            op.set(x.q, x.k, x.v, x.mask, x.sinks)
            op.compute()
            errors.append(float(np.sqrt(np.mean(np.square(op.result() - exact)))))
            op.close()
        found.append(errors)
    print(json.dumps(found))
"""


@needs_level
@pytest.mark.parametrize("level", available_levels())
def test_it_is_as_near_to_float64_as_stock(tmp_path, level):
    """Many tokens (stock's tiles), few (its 16-bit sums), one (its split keys); large scores, spikes, caps."""
    from pathlib import Path

    cases = [
        {"kind": kind, "tokens": tokens, "cells": 900, "types": types, "seed": tokens}
        for kind in ("causal", "window")
        for tokens in (100, 8, 1)
        for types in (("F16", "F16"), ("Q8_0", "Q8_0"), ("F32", "F32"))
    ]
    cases += [
        {"tokens": 100, "factor": 100.0},
        {"tokens": 100, "factor": 1e-3},
        {"tokens": 100, "spikes": True, "types": ("F32", "F32")},
        {"tokens": 100, "cap": 30.0, "factor": 5.0},
        {"tokens": 100, "cap": 50.0},
        {"tokens": 100, "max_bias": 8.0},
        {"tokens": 100, "sinks": [0, 1, 2, 3, 4, 5]},
        {"tokens": 100, "columns": (128, 128), "cells": 3000},
    ]
    code = STOCK.format(folder=str(Path(__file__).parent), level=level, cases=cases)
    for case, (stock, ours) in zip(cases, run(code, str(tmp_path)), strict=True):
        assert ours <= stock * 1.05, case
    assert len(json.dumps(cases))
