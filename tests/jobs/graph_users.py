"""Processes that use graphs of a holder, told by pipes what to do, for tests on the host and on a device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gnnsys.graph import Graph, sbm
from tests.support.processes import Running


def made_graph(columns: int = 0, **arguments: int) -> Graph:
    """A function of a module, as a job names it; who calls it is counted. `columns`: of rows beside those of `sbm`."""
    if (counts := os.environ.get("TEST_GRAPHS_MADE")) is not None:
        with open(counts, "a") as file:
            file.write("x")
    graph = sbm(**arguments)
    if columns:
        graph.set_node_data("more", torch.arange(columns, dtype=torch.float32).repeat(graph.num_nodes(), 1))
    return graph


# A line that it is told, a line that it answers. On a device its context is there before it says "begun".
USER = """
import hashlib, json, os, sys, torch
from gnnsys.graph import NODE
from gnnsys.jobs import check_holder, noted_graphs, release_graphs, shared_graph
from tests.jobs.graph_users import made_graph

graph, arguments = None, json.loads(sys.argv[1])

def map_graph():
    global graph
    with noted_graphs() as noted:
        graph = shared_graph(made_graph, arguments)
    return {"names": noted.graphs, "device": str(graph.node_data[NODE]["x"].device)}

def read():
    whole = hashlib.sha256()
    for array in (graph.node_data[NODE]["x"], graph.csc().indptr, graph.csc().indices):
        whole.update(array.cpu().numpy().tobytes())
    return whole.hexdigest()

def write():
    graph.node_data[NODE]["x"].mul_(7.0)
    return True

def release():
    global graph
    graph = None
    return release_graphs()

def allocate():
    torch.empty(int(os.environ["TEST_BYTES"]), dtype=torch.uint8, device="cuda")
    return True

def work():
    x = torch.ones(512, 512, device="cuda")
    return float((x @ x).sum())

if os.environ["GNNSYS_JOB_DEVICE"] != "cpu":
    work()
todo = {"map": map_graph, "read": read, "write": write, "release": release, "check": check_holder, "work": work,
        "allocate": allocate}
print(json.dumps({"begun": os.getpid()}), flush=True)
for line in open(sys.argv[2]):
    try:
        said = todo[line.strip()]()
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(said), flush=True)
"""


class GraphUsers:
    """`ask(number, what)` is what that process answers; `pids` are theirs."""

    def __init__(
        self,
        running: Running,
        folder: Path,
        arguments: Mapping[str, int],
        environments: list[dict[str, str]],
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._running, self._made = running, folder / "made"
        self._made.touch()
        self._numbers, self._answers = [], [0] * len(environments)
        for number, environment in enumerate(environments):
            os.mkfifo(folder / str(number))
            env = {**environment, "TEST_GRAPHS_MADE": str(self._made), "OMP_NUM_THREADS": "1"}
            code = running.start_code(
                f"user {number}", USER, json.dumps(arguments), folder / str(number), environment=env
            )
            self._numbers.append(code)
        self.pids = [self._answer(number)["begun"] for number in range(len(environments))]
        self._pipes = [open(folder / str(number), "w") for number in range(len(environments))]  # noqa: SIM115

    @property
    def num_made(self) -> int:
        return len(self._made.read_text())

    def tell(self, number: int, what: str) -> None:
        self._pipes[number].write(what + "\n")
        self._pipes[number].flush()

    def ask(self, number: int, what: str) -> Any:
        self.tell(number, what)
        return self._answer(number)

    def ask_all(self, what: str, numbers: list[int] | None = None) -> list[Any]:
        """All at the same time."""
        chosen = list(range(len(self._numbers))) if numbers is None else numbers
        for number in chosen:
            self.tell(number, what)
        return [self._answer(number) for number in chosen]

    def _answer(self, number: int) -> Any:
        self._answers[number] += 1
        said = self._running.await_output(self._numbers[number], "\n", times=self._answers[number])
        return json.loads(said.splitlines()[self._answers[number] - 1])

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
