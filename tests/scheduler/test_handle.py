"""A handle as its readers and the scheduler see it."""

import threading

from llamaherd.errors import ClosedError
from llamaherd.scheduler.handle import Handle
from llamaherd.types import Failed, Finished, Timings, Token, Usage

TOKEN = Token(0, 5, "a", -1.0)
END = Finished((), Usage(1, 0), Timings(0, 0, 0))


def make():
    return Handle("id", lambda handle: None)


def test_reading_on_after_result_ends():
    handle = make()
    handle.push(TOKEN)
    handle.push(END)
    assert handle.result(0) is END
    assert handle.next_event(5) is None
    assert list(handle) == []
    assert handle.result(0) is END


def test_every_reader_of_one_handle_ends():
    handle = make()
    found = []
    readers = [threading.Thread(target=lambda: found.extend(handle), daemon=True) for _ in range(4)]
    for reader in readers:
        reader.start()
    for event in (TOKEN, TOKEN, END):
        handle.push(event)
    for reader in readers:
        reader.join(5)
    assert not any(reader.is_alive() for reader in readers)
    assert found.count(TOKEN) == 2
    assert found.count(END) == 1


def test_a_listener_that_raises_is_dropped_and_harms_nobody():
    handle, calls = make(), []

    def listener():
        calls.append(1)
        raise ZeroDivisionError

    handle.listen(listener)
    handle.push(TOKEN)
    handle.push(END)
    assert len(calls) == 1
    assert list(handle) == [TOKEN, END]


def test_nothing_follows_the_terminal_event():
    handle = make()
    handle.push(Failed(ClosedError("scheduler"), Usage(1, 0)))
    handle.push(TOKEN)
    assert len(list(handle)) == 1
