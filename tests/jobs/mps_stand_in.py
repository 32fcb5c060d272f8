#!/usr/bin/env python3
"""Speaks as nvidia-cuda-mps-control does, where there is no GPU: `-d` starts a daemon that goes on by itself, and what
comes on standard input is asked of the daemon, through the pipe directory. For tests of how processes are handled.

TEST_MPS says what goes wrong: "refuses" (does not start), "hangs" (does not even say so), "silent" (starts, and answers
nothing).
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

PIPE = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
SOCKET = PIPE / "control"
FAULT = os.environ.get("TEST_MPS", "")


def start() -> None:
    if FAULT == "refuses":
        print("Cannot find MPS control daemon's device")
        sys.exit(1)
    if FAULT == "hangs":
        time.sleep(300)
    listener = socket.socket(socket.AF_UNIX)
    SOCKET.unlink(missing_ok=True)
    listener.bind(str(SOCKET))
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("started\nlast words\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if FAULT == "silent" else signal.SIG_DFL)
    threading.Timer(300, os._exit, [3]).start()  # whatever a test forgets
    clients = {4242}
    while True:
        connection, _ = listener.accept()
        words = connection.makefile().readline().split()
        if FAULT == "silent":
            continue
        if words[0] == "quit":
            connection.sendall(b"")
            connection.close()
            SOCKET.unlink()
            os._exit(0)
        if words[0] == "get_server_list":
            connection.sendall(b"77\n")
        elif words[0] == "get_client_list":
            connection.sendall("".join(f"{each}\n" for each in clients).encode() if words[1] == "77" else b"")
        elif words[0] == "terminate_client" and words[1] == "77":
            clients.discard(int(words[2]))
        connection.close()


def ask() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(SOCKET))
        except OSError:
            print("Cannot find MPS control daemon process", file=sys.stderr)
            sys.exit(1)
        connection.sendall(sys.stdin.readline().encode())
        while data := connection.recv(4096):
            sys.stdout.write(data.decode())


start() if sys.argv[1:] == ["-d"] else ask()
