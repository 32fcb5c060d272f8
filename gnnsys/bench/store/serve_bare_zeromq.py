"""`python -m gnnsys.bench.store.serve_bare_zeromq NUM_BYTES`: sends one buffer in frames, uncopied, to whoever asks."""

from __future__ import annotations

import sys

import zmq

from gnnsys.bench.child_process import answer


def serve(num_bytes: int) -> None:
    """Until the benchmark closes this process's input."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.sndhwm = router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    data = memoryview(bytearray(b"\x01") * num_bytes)
    answer({"endpoint": f"tcp://127.0.0.1:{port}"})
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while sys.stdin.fileno() not in dict(poller.poll()):
        sender, size, frame = router.recv_multipart()
        for first in range(0, int(size), int(frame)):
            router.send(sender, zmq.SNDMORE)
            router.send(data[first : min(first + int(frame), int(size))], copy=False)
    router.close()
    context.term()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
