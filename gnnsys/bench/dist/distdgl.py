"""DistDGL on hosts of the lab: one server and some trainers per host, started by hand instead of by DGL's ssh script.

    figures = run_distdgl(lab, folder, num_samplers=1)      # after prepare(task, folder)
    python -m gnnsys.bench.dist.distdgl --nodes 100000 --cpu 0.5 --rate 1gbit --samplers 0 1 2 --json figures.json

DGL tells a process what it is by environment variables. Each trainer has `num_samplers` processes that sample for it;
with none it samples in its own process. Features are always fetched by the trainer, when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gnnsys.bench.dist.task import Task
from gnnsys.bench.lab_jobs import trainer_environment
from gnnsys.lab import Command, Lab, wait_all

PROGRAM = [sys.executable, "-m", "gnnsys.bench.dist.distdgl_run"]
PORT = 30050  # of DGL's servers, in the lab's own network


def prepare(task: Task, folder: Path, timeout: float = 1800.0) -> dict[str, float]:
    """Writes the task and DGL's parts of its graph; returns what partitioning took."""
    task.save(folder)
    done = subprocess.run([*PROGRAM, "partition", str(folder)], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"DGL could not partition the graph: {(done.stderr.strip() or 'no message')[-2000:]}")
    return json.loads((folder / "partition.json").read_text())


def run_distdgl(
    lab: Lab,
    folder: Path,
    *,
    num_samplers: int = 0,
    num_threads: int = 1,
    timeout: float = 1800.0,
    heard: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Trains on the first hosts of the lab; per epoch seconds and samples/s of the whole group, and bytes per link.

    `cpu_seconds` are those of each host for the whole run, start included: they show how much of its quota it got.
    """
    task = Task.load(folder)
    if task.num_hosts > len(lab.hosts):
        raise ValueError(f"the task needs {task.num_hosts} hosts, the lab has {len(lab.hosts)}")
    hosts = list(lab.hosts)[: task.num_hosts]
    (folder / "figures.json").unlink(missing_ok=True)
    before, used = lab.bytes(), {host: lab.usage(host).cpu_seconds for host in hosts}
    run_processes(
        lab, folder, PROGRAM, hosts, task.trainers_per_host,
        num_samplers=num_samplers, num_threads=num_threads, timeout=timeout, heard=heard,
    )  # fmt: skip
    figures = json.loads((folder / "figures.json").read_text())
    moved = {host: lab.bytes()[host] - before[host] for host in hosts}
    figures["bytes_in"] = {str(host): traffic.bytes_in for host, traffic in moved.items()}
    figures["bytes_out"] = {str(host): traffic.bytes_out for host, traffic in moved.items()}
    figures["cpu_seconds"] = {str(host): lab.usage(host).cpu_seconds - used[host] for host in hosts}
    return figures | {"num_samplers": num_samplers, "num_threads": num_threads}


def run_processes(
    lab: Lab,
    folder: Path,
    program: Sequence[str],
    hosts: Sequence[int],
    trainers_per_host: int,
    *,
    num_samplers: int = 0,
    num_threads: int = 1,
    timeout: float = 1800.0,
    heard: Callable[[int, str], None] | None = None,
) -> None:
    """Runs `program serve FOLDER` and as many `program train FOLDER` as there are trainers, on every host, to the end.

    DGL's parts are in FOLDER/parts; `heard` gets the trainers' lines.
    """
    (folder / "ip_config.txt").write_text("".join(f"{lab.address(host, 4)} {PORT}\n" for host in hosts))
    num_trainers = trainers_per_host * len(hosts)
    env = trainer_environment(
        DGLBACKEND="pytorch",
        DGL_DIST_MODE="distributed",
        DGL_IP_CONFIG=str(folder / "ip_config.txt"),
        DGL_CONF_PATH=str(folder / "parts" / "graph.json"),
        DGL_NUM_SERVER="1",
        DGL_NUM_CLIENT=str(num_trainers * (1 + num_samplers)),
        DGL_NUM_SAMPLER=str(num_samplers),
        DGL_GRAPH_FORMAT="csc",
        DGL_KEEP_ALIVE="0",
        OMP_NUM_THREADS=str(num_threads),
        PYTHONUNBUFFERED="1",
    )
    group = {"WORLD_SIZE": str(num_trainers), "MASTER_ADDR": lab.address(hosts[0], 4), "MASTER_PORT": str(PORT + 100)}
    servers: list[Command] = []
    trainers: list[Command] = []
    try:
        for index, host in enumerate(hosts):
            role = {"DGL_ROLE": "server", "DGL_SERVER_ID": str(index)}
            servers.append(lab.start(host, [*program, "serve", str(folder)], env=env | role))
            for rank in range(index * trainers_per_host, (index + 1) * trainers_per_host):
                role = {"DGL_ROLE": "client", "RANK": str(rank)}
                listen = None if heard is None else partial(heard, host)
                trainers.append(lab.start(host, [*program, "train", str(folder)], env=env | group | role, heard=listen))
        wait_all(trainers, timeout)
        wait_all(servers, 60.0, check=False)  # the first trainer has told them to end
    except RuntimeError as error:
        said = "\n".join(f"server of host {server.host}:\n{server.output[-1000:]}" for server in servers)
        raise RuntimeError(f"DistDGL failed: {error}\n{said}") from None
    finally:
        for started in (*trainers, *servers):
            started.kill()


def best_samples_per_s(figures: dict[str, Any]) -> float:
    """The fastest epoch after the first, which pays for warming up (or the first, if it is the only one)."""
    epochs = figures["epochs"][1:] or figures["epochs"]
    return max(epoch["samples_per_s"] for epoch in epochs)


def run_settings(lab: Lab, folder: Path, settings: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """One run per number of samplers, the fastest first."""
    runs = [run_distdgl(lab, folder, num_samplers=num_samplers, **options) for num_samplers in settings]
    return sorted(runs, key=best_samples_per_s, reverse=True)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    graph = {"num_nodes": options.nodes, "num_features": options.features, "avg_degree": options.degree}
    task = Task(
        graph=graph | {"homophily": options.homophily},
        num_hosts=options.hosts,
        trainers_per_host=options.trainers,
        num_epochs=options.epochs,
        max_steps=options.max_steps,
    )
    with tempfile.TemporaryDirectory() as name, Lab(options.hosts, rate=options.rate, cpu=options.cpu) as lab:
        folder = Path(name)
        prepare(task, folder)
        runs = run_settings(lab, folder, options.samplers)
    for run in runs:
        speeds = ", ".join(f"{epoch['samples_per_s']:.0f}" for epoch in run["epochs"])
        print(f"{run['num_samplers']} samplers: {speeds} samples/s per epoch")
    if options.json:
        options.json.write_text(json.dumps({"task": asdict(task), "rate": lab.rate, "cpu": options.cpu, "runs": runs}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distdgl", description="DistDGL on hosts of the lab; needs root and dgl")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=100, help="width of a node's row")
    parser.add_argument("--degree", type=float, default=20.0)
    parser.add_argument("--homophily", type=float, default=0.9, help="share of edges inside a community")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--trainers", type=int, default=1, help="per host")
    parser.add_argument("--samplers", type=int, nargs="+", default=[0, 1, 2], help="settings to try, per trainer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="batches of an epoch, per trainer; default: all")
    parser.add_argument("--rate", help="of every link: 1gbit")
    parser.add_argument("--cpu", type=float, help="cores per host: 0.5")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


if __name__ == "__main__":
    main()
