"""What ZeroMQ moves by itself: the socket that takes frames of another process (`serve_bare`), none of them copied.

Nothing is looked up, framed or checked: the ceiling of what a store on ZeroMQ can do between two processes.
"""

from __future__ import annotations

import zmq

from gnnsys.bench.child_process import Child

_TIMEOUT_MS = 60_000


class BareLink:
    """`pull(num_bytes, frame_bytes)` asks for so many bytes in frames of that size and takes them, untouched; with
    `into` they are also copied there, in the order of arrival."""

    def __init__(self, num_bytes: int) -> None:
        self._child = Child("gnnsys.bench.store.serve_bare_zeromq", str(num_bytes))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.rcvtimeo = self._socket.sndtimeo = _TIMEOUT_MS
        self._socket.rcvhwm = self._socket.linger = 0

    def __enter__(self) -> BareLink:
        self._socket.connect(self._child.answer()["endpoint"])
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()
        self._child.close()

    def pull(self, num_bytes: int, frame_bytes: int, into: memoryview | None = None) -> int:
        self._socket.send_multipart([str(num_bytes).encode(), str(frame_bytes).encode()])
        received = 0
        while received < num_bytes:
            frame = self._socket.recv(copy=False).buffer
            if into is not None:
                into[received : received + len(frame)] = frame
            received += len(frame)
        return received
