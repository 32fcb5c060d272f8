"""The process of a graph server or a sampler: `python -m gnnsys.session.serve`, which a session starts.

It is told what to do in one line on its standard input, answers with one line (its endpoints, or an error), and lives
until that input closes, however its parent ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gnnsys.comm import Keys, end_with_parent
from gnnsys.session.graph_server import GraphServer, wait_for_end

if TYPE_CHECKING:
    from gnnsys.session.sampler_server import SamplerServer


def main() -> int:
    """The process: reads its orders, serves, ends when its input closes, on STOP, or on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainers, which still need this server to end well
    orders = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not orders:
        return 1  # whoever started this process has gone already
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes where errors go: the pipe is for the one answer
    if orders["parent_death"]:
        end_with_parent(int(orders["parent"]))
    try:
        graph_server = _make(orders)
        endpoints = graph_server.start()
    except Exception as error:  # whatever it is, the session raises it on every rank
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    _answer(answers, {"endpoints": endpoints, "pid": os.getpid()})
    try:
        wait_for_end(graph_server.stopped, [signal.SIGTERM], watch_input=True)
    finally:
        graph_server.close()
    return 0


def _make(orders: Mapping[str, Any]) -> GraphServer | SamplerServer:
    keys = None if orders["keys"] is None else Keys.from_json(orders["keys"])
    if (sampler := orders["sampler"]) is not None:
        from gnnsys.session.sampler_server import SamplerServer  # with all of the loaders, which a graph server has not

        return SamplerServer(
            sampler["path"],
            int(orders["machine"]),
            int(sampler["number"]),
            bind=orders["bind"],
            keys=keys,
            threads=int(orders["threads"]),
            is_reserved=orders["is_reserved"],
        )
    graph_server = GraphServer(
        int(orders["machine"]),
        bind=orders["bind"],
        keys=keys,
        threads=int(orders["threads"]),
        life=int(orders["life"]),
        lost_after=float(orders["lost_after"]),
        is_reserved=orders["is_reserved"],
        io_threads=orders["io_threads"],
        rate_out=orders["rate_out"],
        order=orders["order"],
    )
    if orders["open"] is not None:  # before it listens: whoever finds it back finds all of it
        graph_server.open(orders["open"]["path"], orders["open"]["parts"], verify=False)
    return graph_server


def _answer(pipe: Any, value: dict[str, Any]) -> None:
    with pipe:
        pipe.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # everything is closed: libraries need not take a second to take leave
