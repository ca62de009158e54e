"""Arrays on the way."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest

from llamaherd.errors import InvalidParameterError, RequestError
from llamaherd.shard import wire

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("width", [1, 32, 33, 576])
@pytest.mark.parametrize(("form", "error"), [("f32", 0), ("f16", 2**-11), ("q8_0", 1 / 254)])
def test_arrays(form, error, width):
    values = (RNG.standard_normal((7, width)) * 10).astype(np.float32)
    values[3] = 0
    back = wire.decode_array(wire.encode_array(values, form), form, 7, width)
    assert back.dtype == np.float32
    assert np.abs(back - values).max() <= error * np.abs(values).max()
    if not error:
        assert np.array_equal(back, values)


def test_large_values_do_not_become_infinite():
    values = np.array([[1e6, -1e6]], np.float32)
    assert np.isfinite(wire.decode_array(wire.encode_array(values, "f16"), "f16", 1, 2)).all()


def test_no_such_form():
    with pytest.raises(InvalidParameterError, match="f32, f16, q8_0"):
        wire.encode_array(np.zeros((1, 1), np.float32), "f8")


@pytest.mark.parametrize("form", ["f32", "f16", "q8_0", "tokens"])
@pytest.mark.parametrize("size", [0, 3, 4, 1000])
def test_arrays_of_another_size_are_refused(form, size):
    n = np.zeros(3, np.int32).tobytes()
    header = wire.Header(0, 0, [], n, n, bytes(3), form, 8)
    with pytest.raises(RequestError):
        header.work(bytes(size), last=False)


def test_settings_arrive():
    config = wire.StageConfig(index=1, path="p", start=0, end=2, keys=wire.Keys.make(), admitted=[b"x"])
    file = io.BytesIO()
    wire.write_config(file, config)
    file.seek(0)
    assert wire.read_config(file) == config


@pytest.mark.parametrize(
    "command", [wire.Configure(1, "a", b"k"), wire.Ping(3), wire.Abort(1, 2), wire.Stop()]
)
def test_commands_arrive(command):
    data = msgspec.msgpack.encode(command)
    assert msgspec.msgpack.decode(data, type=wire.Command) == command
