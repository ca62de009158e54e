import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamaherd.engine.model import Model
from llamaherd.errors import RequestError, TokenError
from llamaherd.files.synthesize import synthesize
from llamaherd.types import PromptPart


@pytest.fixture(scope="session", params=["bpe", "spm"])
def vocabulary(request, tmp_path_factory):
    path = synthesize(tmp_path_factory.mktemp("v") / "v.gguf", "llama", tokenizer=request.param, seed=3)
    with Model.load(path, vocab_only=True) as model:
        yield model.vocabulary


@given(text=st.text(max_size=40))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_survives_the_way_there_and_back(vocabulary, text):
    text = "x" + text.replace("\0", "")  # some text first: SPM puts a space before it
    tokens = vocabulary.encode(text, add_special=False)
    assert vocabulary.decode(tokens).removeprefix(" ") == text.encode("utf-8", "replace").decode()


def test_user_text_never_becomes_control_tokens(vocabulary):
    controls = vocabulary.control_texts()
    assert "<|im_start|>" in controls
    for text, token in controls.items():
        assert token not in vocabulary.encode(f"say {text} please", add_special=False)
        assert token not in vocabulary.encode_prompt(f"say {text} please")[1:]
        if text:
            assert token in vocabulary.encode(text, add_special=False, parse_special=True)


def test_parts_say_where_control_tokens_may_be(vocabulary):
    start = vocabulary.control_texts()["<|im_start|>"]
    parts = [PromptPart("<|im_start|>", parse_special=True), PromptPart("<|im_start|>")]
    assert vocabulary.encode_prompt(parts).count(start) == 1


def test_bos_is_added_exactly_once(vocabulary):
    if not vocabulary.add_bos:
        pytest.skip("this vocabulary adds none")
    assert vocabulary.encode_prompt("hello").count(vocabulary.bos) == 1
    bos = vocabulary.piece(vocabulary.bos, special=True).decode()
    assert (
        vocabulary.encode_prompt([PromptPart(bos + "hello", parse_special=True)]).count(vocabulary.bos) == 1
    )
    assert vocabulary.encode_prompt([PromptPart("a"), PromptPart("b")]).count(vocabulary.bos) == 1
    assert vocabulary.encode("hello", add_special=False).count(vocabulary.bos) == 0


def test_lone_surrogates_do_not_reach_llama_cpp(vocabulary):
    assert "\ufffd" in vocabulary.decode(vocabulary.encode("a\ud800b", add_special=False))


def test_ids_out_of_range(vocabulary):
    with pytest.raises(TokenError) as error:
        vocabulary.encode_prompt([0, vocabulary.n_tokens])
    assert (error.value.index, error.value.n_vocab) == (1, vocabulary.n_tokens)
    with pytest.raises(TokenError):
        vocabulary.piece(-1)
    with pytest.raises(RequestError):
        vocabulary.encode_prompt(["text", "in", "a", "list"])


def test_pieces_of_control_tokens_are_empty_unless_asked_for(vocabulary):
    start = vocabulary.control_texts()["<|im_start|>"]
    assert vocabulary.piece(start) == b""
    assert vocabulary.piece(start, special=True) == b"<|im_start|>"
    assert vocabulary.decode([start]) == ""


@pytest.mark.parametrize("token", ["x", None, 1.5, -1, 10**6000], ids=["str", "none", "float", "-1", "huge"])
def test_token_ids_of_the_wrong_kind(tiny_model, token):
    vocabulary = tiny_model.vocabulary
    for call in (
        vocabulary.piece,
        vocabulary.is_control,
        lambda t: vocabulary.decode([t]),
        lambda t: vocabulary.piece(t, special=True),
    ):
        with pytest.raises(TokenError):
            call(token)
    assert vocabulary.piece(np.int64(97)) == vocabulary.piece(97)


@pytest.mark.parametrize(
    "prompt", [None, 5, b"abc", [10**6000, "a"], [1.5], [True], {1: 2}, iter([1])], ids=type
)
def test_prompts_of_the_wrong_kind(tiny_model, prompt):
    with pytest.raises(RequestError):
        tiny_model.vocabulary.encode_prompt(prompt)


@pytest.mark.parametrize("text", [None, 5, b"abc"])
def test_texts_of_the_wrong_kind(tiny_model, text):
    with pytest.raises(RequestError):
        tiny_model.vocabulary.encode(text)
