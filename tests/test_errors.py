"""Errors as data: what they carry, shown in full and passed between processes."""

import copy
import pickle

import pytest

from llamaherd import errors

EXAMPLES = [
    errors.UnknownParameterError("topk", ["top_k"], of="SamplingConfig"),
    errors.InvalidParameterError("top_p", 2, "a number in [0, 1]"),
    errors.ModelNotFoundError("/no/model.gguf"),
    errors.MalformedFileError("/a.gguf", "a bad length", 5),
    errors.TruncatedFileError("/a.gguf", "the header", needed=24, size=3),
    errors.DuplicateTokenError("/a.gguf", "a", 1, 2),
    errors.LibraryError("no library", "log"),
    errors.ModelLoadError("/a.gguf", "refused", "log"),
    errors.DecodeError(-3, "failed", "log"),
    errors.DecodeAbortedError(),
    errors.PromptTooLongError(3, 2),
    errors.TokenError(5, 4, 1),
    errors.GrammarError("root", "no"),
    errors.OutOfSequencesError(3, 2, 4),
    errors.OutOfCellsError(3, 2, 4),
    errors.QueueFullError(3),
    errors.ClosedError("context"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_errors_are_the_same_after_pickling_and_copying(error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize("value", [10**6000, "x" * 10**6, b"y" * 10**6], ids=["int", "str", "bytes"])
def test_messages_stay_short_whatever_the_value(value):
    for error in (
        errors.InvalidParameterError("n", value, "an integer"),
        errors.TokenError(value, 4),
        errors.PositionError(value, "0"),
        errors.SequenceError(value, "0"),
    ):
        assert 20 < len(str(error)) < 300
