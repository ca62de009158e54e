"""A stage behind sockets.

Two threads: *data* takes steps, computes them and passes them on, in order; *control* answers the head at any
time, also while a step is being computed.
"""

from __future__ import annotations

import os
import threading
import time

import msgspec
import zmq

from ..errors import DecodeAbortedError, LlamaherdError, StageLostError
from ..wire_errors import pack_error
from . import wire
from .draws import pack_picks
from .stage import Stage
from .work import perform

__all__ = ["StageServer"]


class StageServer:
    """Serves one stage to the head of a pipeline and to the stage before it.

    Args:
        stage: closed when run() ends.
        config: its addresses, keys and place.
    """

    def __init__(self, stage: Stage, config: wire.StageConfig) -> None:
        self.stage = stage
        self.config = config
        self._zmq = zmq.Context()
        self._authenticator = wire.admit_only(self._zmq, config.admitted)
        self._data = self._listen(zmq.PULL)
        self._control = self._listen(zmq.ROUTER)
        self._lock = threading.Lock()  # of everything that a step and a Configure both touch
        self._out: zmq.Socket[bytes] | None = None
        self._epoch = self._expected = -1
        self._aborted = (-1, -1)  # steps of an epoch up to a number
        self._seconds = 0.0
        self._refused = 0
        self._stopping = False
        self.endpoint = wire.Endpoint(
            data=wire.address_of(self._data),
            control=wire.address_of(self._control),
            key=config.keys.public,
            facts=stage.facts,
            pid=os.getpid(),
        )

    def _listen(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._zmq.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        self.config.keys.serve(socket)
        socket.bind_to_random_port(f"tcp://{self.config.host}")
        return socket

    def run(self) -> None:
        """Serve until told to stop."""
        control = threading.Thread(target=self._obey, name="control", daemon=True)
        control.start()
        poller = zmq.Poller()
        poller.register(self._data, zmq.POLLIN)
        while not self._stopping:
            if poller.poll(100):
                self._take(self._data.recv_multipart())
        control.join()
        self._authenticator.stop()
        for socket in (self._data, self._control, self._out):
            if socket is not None:
                socket.close(0)
        self._zmq.term()
        self.stage.close()

    # ---------------------------------------------------------------------------------------- data

    def _take(self, frames: list[bytes]) -> None:
        try:
            header = msgspec.msgpack.decode(frames[0], type=wire.Header)
            payload = frames[1]
        except (msgspec.MsgspecError, IndexError):
            self._refused += 1
            return
        with self._lock:
            if header.epoch != self._epoch or header.number != self._expected:
                self._refused += 1  # of before a recovery, or played again
                return
            self._expected += 1
            self._pass_on(header, payload)

    def _pass_on(self, header: wire.Header, payload: bytes) -> None:
        began = time.perf_counter()
        error = header.error
        form, width, data, picks = "none", 1, b"", b""
        try:
            work = header.work(payload, self.stage.last)
            aborted = error is None and work.inputs is not None and self._is_aborted(header)
            result = perform(self.stage, work.operations_only() if aborted or error else work)
            if aborted:
                raise DecodeAbortedError
            if isinstance(result, list):
                picks, result = pack_picks(result)
            if result is not None:
                form = "logits" if self.stage.last else self.config.activations
                width, data = result.shape[1], wire.encode_array(result, form)
        except StageLostError as failure:
            error = error or pack_error(StageLostError(self.config.index, failure.cause))
        except LlamaherdError as failure:
            error = error or pack_error(failure)
        seconds = time.perf_counter() - began
        self._seconds += seconds
        passed = msgspec.structs.replace(
            header, form=form, width=width, error=error, seconds=[*header.seconds, seconds], picks=picks
        )
        assert self._out is not None
        self._out.send_multipart([msgspec.msgpack.encode(passed), data])

    def _is_aborted(self, header: wire.Header) -> bool:
        epoch, number = self._aborted
        return header.epoch == epoch and header.number <= number

    # ------------------------------------------------------------------------------------- control

    def _obey(self) -> None:
        decoder = msgspec.msgpack.Decoder(wire.Command)
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        while not self._stopping:
            if not poller.poll(200):
                continue
            sender, message = self._control.recv_multipart()[:2]
            try:
                command = decoder.decode(message)
            except msgspec.MsgspecError:
                self._refused += 1
                continue
            if isinstance(command, wire.Abort):
                self._aborted = (command.epoch, command.number)
                self.stage.abort()
            elif isinstance(command, wire.Stop):
                self._stopping = True
                self.stage.abort()
            else:
                number = command.number if isinstance(command, wire.Ping) else self._configure(command)
                pong = wire.Pong(number, self._seconds, self.stage.memory.used_cells, self._refused)
                self._control.send_multipart([sender, msgspec.msgpack.encode(pong)])

    def _configure(self, command: wire.Configure) -> int:
        self._aborted = (self._epoch, 1 << 62)
        self.stage.abort()
        with self._lock:
            self.stage.memory.clear()
            if self._out is not None:
                self._out.close(0)
            self._out = self._zmq.socket(zmq.PUSH)
            self._out.setsockopt(zmq.SNDHWM, 0)
            self.config.keys.call(self._out, command.key)
            self._out.connect(command.address)
            self._epoch, self._expected = command.epoch, 0
        return command.epoch
