"""A request that goes on elsewhere gives the very bits that it would have given."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig

pytestmark = pytest.mark.real

PROMPT = (
    "The mountains were covered in snow, and the old road that led over them had not been used for years. "
    * 5
)


@pytest.mark.parametrize("given", [1, 40, 79])
def test_resumed_text_is_bitwise_the_same(demo_model_path: Path, given: int) -> None:
    request = GenerationRequest(
        PROMPT, max_tokens=80, sampling=SamplingConfig(temperature=0.9, seed=3), ignore_eos=True
    )
    with Model.load(demo_model_path) as model:
        with Herd(model, n_ctx=4096, max_sequences=4, kv_unified=False) as herd:
            whole = herd.generate(request).completions[0]
        with Herd(model, n_ctx=4096, max_sequences=4, kv_unified=False) as herd:
            resumed = GenerationRequest(
                PROMPT,
                max_tokens=80,
                sampling=request.sampling,
                ignore_eos=True,
                resume={0: whole.tokens[:given]},
            )
            rest = herd.generate(resumed).completions[0]
    assert rest.tokens == whole.tokens
    assert rest.logprobs[-(80 - given) :] == whole.logprobs[given:]
