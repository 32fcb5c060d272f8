"""A cluster in a box: hosts with their own network, name, processes, shared memory and limits, on one machine.

    with Lab(hosts=2, rate="1gbit", cpu=0.5) as lab:
        lab.run(["--nproc-per-node", "2", "train.py", "parts/"])   # torchrun on every host
        print(lab.bytes())

Hosts are numbered from 1 and named h1, h2, ...; they share the file system, but not /dev/shm. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gnnsys.lab import control_groups, state
from gnnsys.lab.command import Command, Result
from gnnsys.lab.network import KEEP, HostTraffic, Network, address, hosts_file, parse_rate, queue_seconds
from gnnsys.observe import UNLIMITED, num_usable_cores, parse_size

if TYPE_CHECKING:
    from gnnsys.launch import LaunchPlan

START_SECONDS = 60.0
PLAN = "GNNSYS_PLAN"  # by which `gnnsys.open` finds a plan
GRACE_SECONDS = 30.0  # that hosts have to notice that another one has failed
_TRIAL = (
    "ip link add name lab0 type bridge && ip link add name lab1 type veth peer name lab2 "
    "&& tc qdisc add dev lab1 root tbf rate 1mbit burst 32k latency 50ms"
)


@cache
def available() -> str | None:
    """Why a lab cannot be made here, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "the lab needs root: it makes namespaces and control groups"
    for program in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the lab needs the program {program}"
    if isinstance(roots := control_groups.find_roots(), str):
        return f"the lab needs control groups: {roots}"
    spaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    trial = subprocess.run([*spaces, "sh", "-c", _TRIAL], capture_output=True, text=True, timeout=30)
    if trial.returncode:
        return f"this kernel cannot make a lab's network: {trial.stderr.strip()}"
    return None


class Lab:
    """`hosts` machines on one switch; limits hold for each host.

    `rate`: of every link, in and out ("1gbit"; None: no limit). `cpu`: cores that a host may use (0.45). Both may be
    lists with a value for each host: `rate=["250mbit", "50mbit"]`. `memory` and `shm`: sizes ("3g"). `family`: whether
    host names resolve to IPv4 or IPv6 addresses; hosts have both. `period`: seconds over which the CPU quota is kept;
    with a short one a host is always slow, instead of fast and then stopped.

    Hosts have their quotas beside whatever else runs: a lab whose hosts all have one, no more than this machine has
    cores for, comes before other processes, which share the rest. `weight`: how many other processes any other lab
    counts as where there are too few cores for all (1).
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        rate: str | Sequence[str | None] | None = None,
        cpu: float | Sequence[float | None] | None = None,
        memory: str | int | None = None,
        shm: str | int = "1g",
        family: int = 4,
        period: float = 0.02,
        weight: float = 1.0,
    ) -> None:
        if not weight > 0:
            raise ValueError(f"weight must be more than 0, got {weight}")
        if not 1 <= hosts <= 200:
            raise ValueError(f"hosts must be from 1 to 200, got {hosts}")
        if family not in (4, 6):
            raise ValueError(f"family must be 4 or 6, got {family}")
        cpus: list[float | None] = _by_host("cpu", cpu, hosts)
        rates: list[str | None] = _by_host("rate", rate, hosts)
        for each in cpus:
            _check_cpu(each, period)
        for link in rates:
            if link is not None:
                parse_rate(link)
        self.id = secrets.token_hex(3)
        self.rate = rate if isinstance(rate, str) else rates[0] if len(set(rates)) == 1 else None
        self._spec: dict[str, Any] = {
            "id": self.id,
            "num_hosts": hosts,
            "rate": _same(rates),
            "cpu": _same(cpus),
            "memory": None if memory is None else parse_size(memory),
            "shm": parse_size(shm),
            "family": family,
            "period": period,
            "weight": weight,
        }
        self._num_runs = 0
        self._host_groups: list[control_groups.HostGroups] = []
        self._keeper: subprocess.Popen[str] | None = None

    # --- making it and taking it down

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self, *, tied: bool = True) -> Lab:
        """Makes the hosts. A tied lab ends with this process, even if it is killed; an untied one only by `down`."""
        if reason := available():
            raise RuntimeError(reason)
        state.remove_dead()
        try:
            self._make(tied)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Kills everything in the lab and removes it. Idempotent."""
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(15.0)
        with contextlib.suppress(ValueError):  # removed already, by its keeper or by another lab
            state.remove(self.id)
        if self._keeper is not None:
            self._keeper.wait(15.0)
            self._keeper = None

    @classmethod
    def attach(cls, lab: str) -> Lab:
        """A lab that another process made with `up(tied=False)`."""
        found = state.read(lab)
        names = ("rate", "cpu", "memory", "shm", "family", "period", "weight")
        made = cls(found["num_hosts"], **{name: found[name] for name in names})
        made.id = lab
        if "ways" in found:
            made._spec["ways"] = found["ways"]
        made._connect(found)
        return made

    def _make(self, tied: bool) -> None:
        roots = control_groups.find_roots()
        assert isinstance(roots, control_groups.Roots)
        top = roots.of(f"gnnsys-lab-{self.id}")
        by_host = {name: roots.of(f"gnnsys-lab-{self.id}/{name}") for name in self.names}
        made = self._spec | {
            "tied": tied,
            "owner_pid": os.getpid(),
            "owner_start": state.process_start(os.getpid()),
            "roots": roots.to_json(),
            "groups": [str(path) for path in top.paths],
            "leaves": {
                name: [str(path / "first") for path in host_groups.paths] for name, host_groups in by_host.items()
            },
        }
        path = state.write(self.id, made)
        (path.parent / "hosts").write_text(hosts_file(self.names, self._spec["family"]))
        top.make(None, None, 0.1)
        if roots.version == 2:
            (top.cpu / "cgroup.subtree_control").write_text("+cpu +memory")
        for host_groups in by_host.values():
            host_groups.make(None, self._spec["memory"], self._spec["period"])
            host_groups.leaf("first")
        self._start_keeper(path, tied)
        self._connect(state.read(self.id))
        self._network.make()
        for host, rate, cpu in zip(self.hosts, self._rates(), self._cpus(), strict=True):
            self._network.set_rate(host, rate, rate)
            if cpu is not None:
                self._host_groups[host - 1].set_cpu(cpu, self._spec["period"])
        self._weigh()

    def _start_keeper(self, path: Path, tied: bool) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(path)]
        self._keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if tied else subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as stream:
            ready = wait([stream.fileno()], START_SECONDS)
            answer = stream.readline().strip() if ready else f"no word from its keeper in {START_SECONDS:g} s"
        if answer != "ready":
            raise RuntimeError(f"the lab could not be made: {answer or 'its keeper ended'}")

    def _connect(self, found: dict[str, Any]) -> None:
        roots = control_groups.Roots.from_json(found["roots"])
        self._top = roots.of(f"gnnsys-lab-{self.id}")
        self._host_groups = [roots.of(f"gnnsys-lab-{self.id}/{name}") for name in self.names]
        self._first_pids: list[int] = found["host_pids"]
        self._network = Network(found["switch_pid"], self._first_pids)

    # --- what it is

    @property
    def hosts(self) -> range:
        """The hosts' numbers, from 1."""
        return range(1, self._spec["num_hosts"] + 1)

    @property
    def names(self) -> list[str]:
        return [f"h{host}" for host in self.hosts]

    def address(self, host: int, family: int | None = None) -> str:
        return address(self._check(host), family or self._spec["family"])

    def bytes(self) -> dict[int, HostTraffic]:
        """What went into and out of every host since the lab was made, from the kernel's counters."""
        return self._network.traffic()

    def usage(self, host: int) -> control_groups.Usage:
        """Processor time, peak memory and throttled time of a host since the lab was made."""
        return self._host_groups[self._check(host) - 1].usage()

    # --- changing it while it runs

    def set_rate(self, rate: str | None, *, host: int | None = None, into: bool = True, out: bool = True) -> None:
        """Another rate for all links or one host's; None is as fast as the machine is."""
        if rate is not None:
            parse_rate(rate)
        for which in self.hosts if host is None else [self._check(host)]:
            self._network.set_rate(which, rate if into else KEEP, rate if out else KEEP)
            ways = self._spec.setdefault("ways", [[each, each] for each in self._rates()])[which - 1]
            ways[:] = [rate if into else ways[0], rate if out else ways[1]]
        if host is None and into and out:
            self.rate = rate
        self._note("ways", self._spec["ways"])

    def set_cpu(self, cpu: float | None, *, host: int | None = None) -> None:
        """Another quota for every host or one, None for no limit: a benchmark may start its programs without one."""
        _check_cpu(cpu, self._spec["period"])
        cpus = self._cpus()
        for which in self.hosts if host is None else [self._check(host)]:
            self._host_groups[which - 1].set_cpu(cpu, self._spec["period"])
            cpus[which - 1] = cpu
        self._note("cpu", _same(cpus))
        self._weigh()

    def cut(self, host: int) -> None:
        """Pulls the host's cable: packets both ways are lost from now on."""
        self._network.set_link(self._check(host), up=False)

    def heal(self, host: int) -> None:
        """Plugs it in again."""
        self._network.set_link(self._check(host), up=True)

    def kill(self, host: int) -> None:
        """Every command on the host dies at once, as if it had lost power; the host can be used again."""
        host_groups = self._host_groups[self._check(host) - 1]
        leaves = [leaf for path in host_groups.paths for leaf in path.glob("command-*")]
        control_groups.kill(leaves)

    def _weigh(self) -> None:
        """Before all others where quotas can be kept that way, and leave them the rest."""
        quotas = [quota for quota in self._cpus() if quota is not None]
        kept = len(quotas) == len(self.hosts) and sum(quotas) <= num_usable_cores()
        self._top.set_weight(control_groups.MOST_WEIGHT if kept else self._spec["weight"])

    def _rates(self) -> list[str | None]:
        return _by_host("rate", self._spec["rate"], self._spec["num_hosts"])

    def _cpus(self) -> list[float | None]:
        return _by_host("cpu", self._spec["cpu"], self._spec["num_hosts"])

    def _note(self, name: str, value: Any) -> None:
        """Keeps what was changed, for this process and for who attaches later."""
        self._spec[name] = value
        with contextlib.suppress(ValueError):  # it is down
            state.write(self.id, state.read(self.id) | {name: value})

    def describe(self) -> dict[str, Any]:
        """The lab as a cluster file has it: hosts by name, with cores, memory, rates and queues as they are now.

        A host without a quota has the cores of the machine, which it shares with the others.
        """
        ways = self._spec.get("ways", [[rate, rate] for rate in self._rates()])
        hosts = []
        for name, cpu, (into, out) in zip(self.names, self._cpus(), ways, strict=True):
            told: dict[str, Any] = {"name": name, "cores": num_usable_cores() if cpu is None else cpu}
            if self._spec["memory"] is not None:
                told["memory"] = self._spec["memory"]
            rates = {"rate": into} if into == out else {"rate_in": into, "rate_out": out}
            told |= {way: UNLIMITED if rate is None else rate for way, rate in rates.items()}
            if into is not None or out is not None:
                told["queue"] = max(queue_seconds(rate) for rate in (into, out) if rate is not None)
            hosts.append(told)
        return {"hosts": hosts}

    # --- using it

    def start(
        self,
        host: int,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        heard: Callable[[str], None] | None = None,
        known: list[Command] | None = None,
    ) -> Command:
        """Starts a command on a host (a string is for the shell) and returns at once; `heard` gets every line.

        It is appended to `known` before anything of it runs: for who kills it should an interrupt come.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        index = self._check(host) - 1
        return Command(
            host, argv, self._host_groups[index], self._first_pids[index], env=env, cwd=cwd, heard=heard, known=known
        )

    def exec(
        self,
        host: int,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        heard: Callable[[str], None] | None = None,
    ) -> Result:
        """Runs a command on one host to its end. RuntimeError if it fails, unless `check` is False."""
        started: list[Command] = []
        try:
            self.start(host, command, env=env, cwd=cwd, heard=heard, known=started)
            return wait_all(started, timeout, check=check)[0]
        finally:
            for each in started:
                each.kill()

    def become(self, host: int, command: str) -> NoReturn:
        """This process becomes a shell command on a host, with its own input and output, as ssh would have it run.

        It is in the host's control groups, and dies with the host (`kill`, `down`).
        """
        index = self._check(host) - 1
        for leaf in self._host_groups[index].leaf(f"command-{secrets.token_hex(4)}"):
            (leaf / "cgroup.procs").write_text("0")
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        os.execvp("nsenter", ["nsenter", f"--target={self._first_pids[index]}", *spaces, "--", "sh", "-c", command])

    def run(
        self,
        args: Sequence[str],
        *,
        timeout: float = 600.0,
        check: bool = True,
        hosts: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        heard: Callable[[int, str], None] | None = None,
        plan: str | os.PathLike[str] | LaunchPlan | None = None,
    ) -> list[Result]:
        """torchrun with these arguments on every host (or some), meeting at the first; results in their order.

        `plan`: says which hosts, how many ranks on each, and, to `gnnsys.open`, who serves which part.
        When one host fails the others have `GRACE_SECONDS` to notice. RuntimeError if any fails, unless not `check`.
        """
        chosen = list(hosts or self.hosts)
        own_args: list[list[str]] = [[] for _ in chosen]
        planned: dict[str, str] = {}
        assisting: list[int] = []  # hosts without ranks
        if plan is not None:
            if hosts is not None or any(arg.startswith(("--nproc-per-node", "--nproc_per_node")) for arg in args):
                raise ValueError("the plan says which hosts take part and how many ranks each has: leave both away")
            chosen, own_args, planned, assisting = self._planned(plan)
        self._num_runs += 1
        meeting = f"{self.names[self._check(chosen[0]) - 1]}:{29400 + secrets.randbelow(2000)}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(chosen)}"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", f"--rdzv-id={self.id}-{self._num_runs}"]
        # Without the second a group that was restarted reads the keys of the one before it.
        own = {"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **planned, **(env or {})}
        started: list[Command] = []
        assistants: list[Command] = []
        try:
            for host in assisting:
                listen = None if heard is None else partial(heard, host)
                command = [sys.executable, "-m", "gnnsys.cli", "assist"]
                self.start(host, command, env=own, cwd=cwd, heard=listen, known=assistants)
            for host, more in zip(chosen, own_args, strict=True):
                listen = None if heard is None else partial(heard, host)
                self.start(host, [*torchrun, *more, *args], env=own, cwd=cwd, heard=listen, known=started)
            return wait_all(started, timeout, check=check)
        finally:
            for each in [*started, *assistants]:
                each.kill()

    def _planned(
        self, plan: str | os.PathLike[str] | LaunchPlan
    ) -> tuple[list[int], list[list[str]], dict[str, str], list[int]]:
        """Hosts with ranks of a plan, what torchrun is told on each, what all are told, and the hosts without ranks."""
        from gnnsys.comm import endpoint  # imports torch
        from gnnsys.launch import read_plan
        from gnnsys.session import ASSISTANTS, Assistants

        made = read_plan(plan) if isinstance(plan, (str, os.PathLike)) else plan
        if unknown := [host.name for host in made.hosts if host.name not in self.names]:
            raise ValueError(f"the plan has host {unknown[0]}, the lab has {', '.join(self.names)}")
        chosen = [self.names.index(host.name) + 1 for host in made.hosts_with_ranks]
        words = [[f"--nproc-per-node={host.num_ranks}"] for host in made.hosts_with_ranks]
        told = {PLAN: made.line_for_ranks()}
        assisting = [self.names.index(host.name) + 1 for host in made.hosts if not host.num_ranks]
        if assisting:
            port = 31400 + secrets.randbelow(2000)
            endpoints = {self.names[host - 1]: endpoint(self.address(host), port) for host in assisting}
            told[ASSISTANTS] = Assistants.with_new_key(endpoints).text()
        return chosen, words, told, assisting

    def _check(self, host: int) -> int:
        if host not in self.hosts:
            raise ValueError(f"host must be from 1 to {len(self.hosts)}, got {host}")
        return host


def _by_host(name: str, given: Any, hosts: int) -> list[Any]:
    """A value for each host, from one for all or a list."""
    if not isinstance(given, list | tuple):
        return [given] * hosts
    if len(given) != hosts:
        raise ValueError(f"{name} must be one value, or one for each of {hosts} hosts, got {len(given)}")
    return list(given)


def _same(values: Sequence[Any]) -> Any:
    """The value that all hosts have, or those of each."""
    return values[0] if len(set(values)) == 1 else list(values)


def _check_cpu(cpu: float | None, period: float) -> None:
    if cpu is not None and cpu * period < 0.001:
        raise ValueError(f"cpu must be at least {0.001 / period:g} cores for a period of {period:g} s, got {cpu}")


def wait_all(
    commands: Sequence[Command], timeout: float, *, check: bool = True, grace: float = GRACE_SECONDS
) -> list[Result]:
    """Results of commands that belong together, in their order; whatever happens none of them is left running.

    One deadline for all. When one fails the others have `grace` seconds to notice, then they are killed too.
    """
    end = time.monotonic() + timeout
    try:
        waiting = list(commands)
        while waiting and time.monotonic() < end:
            for command in [c for c in waiting if c.done()]:
                waiting.remove(command)
                if not command.wait(0).ok:
                    end = min(end, time.monotonic() + grace)
            time.sleep(0.02)
        results = [command.wait(0) for command in commands]
    finally:
        for command in commands:
            command.kill()
    failed = [result.describe() for result in results if not result.ok]
    if check and failed:
        raise RuntimeError(f"{len(failed)} of {len(results)} commands failed\n" + "\n".join(failed))
    return results
