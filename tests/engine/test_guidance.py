from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig
from llamaherd.engine.guidance import check_schema
from llamaherd.errors import GrammarError, InvalidParameterError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "no JSON"),
        ("[" * 5000, "no JSON"),
        ("[]", "object or a boolean"),
        ("3", "object or a boolean"),
        (nested(70), "nested"),
        (json.dumps({"enum": list(range(6000))}), "values"),
        (json.dumps({"const": "x" * 600_000}), "characters"),
        ('{"$ref": "https://example.com/x"}', "outside"),
        ('{"properties": {"a": {"$ref": "file:///etc/passwd"}}}', "outside"),
        ('{"$dynamicRef": "other.json#a"}', "outside"),
    ],
)
def test_hostile_schemas_are_refused_before_anything_compiles_them(schema: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        check_schema(schema)


def test_references_within_are_fine() -> None:
    assert check_schema('{"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}')


def test_not_beside_a_grammar() -> None:
    with pytest.raises(InvalidParameterError, match="json_schema"):
        SamplingConfig(json_schema="{}", grammar="root ::= [a]")


@pytest.fixture(scope="module")
def herd(demo_model_path: Path) -> Iterator[Herd]:
    with Model.load(demo_model_path) as model, Herd(model, n_ctx=1024, max_sequences=4, n_threads=1) as herd:
        yield herd


def run(herd: Herd, schema: Any, **fields: Any) -> Any:
    sampling = SamplingConfig(
        temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3, json_schema=json.dumps(schema)
    )
    return herd.generate(GenerationRequest("As JSON: ", sampling=sampling, max_tokens=150, **fields))


@pytest.mark.real
def test_every_candidate_validates(herd: Herd) -> None:
    for completion in run(herd, PERSON, n=4).completions:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), PERSON)


@pytest.mark.real
def test_a_resumed_candidate_still_follows_its_schema(herd: Herd) -> None:
    whole = run(herd, PERSON).completions[0]
    assert len(whole.tokens) > 10
    resumed = run(herd, PERSON, resume={0: whole.tokens[:9]}).completions[0]
    assert resumed.tokens[:9] == whole.tokens[:9]
    jsonschema.validate(json.loads(resumed.text), PERSON)


@pytest.mark.real
@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"not": {}}, {"type": "integer", "minimum": 5, "maximum": 3}]
)
def test_what_cannot_be_followed_fails_for_its_submitter_alone(herd: Herd, schema: Any) -> None:
    with pytest.raises(GrammarError):
        run(herd, schema)
    assert herd.generate(GenerationRequest("Hello", max_tokens=2)).completions
