"""One life of a job: an agent on every host, torchrun under each, and how it ended.

All hosts are one group: when a rank fails or a host is lost, the others are ended too.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gnnsys.launch.channel import CLOSE_SECONDS, AgentChannel, HostError, HostLost, agent_command
from gnnsys.launch.hosts import Host
from gnnsys.launch.line_queue import LineQueue
from gnnsys.launch.local_facts import versions
from gnnsys.launch.network_probe import PATIENCE, LinkSpeed
from gnnsys.launch.preflight import Checks, Finding, Preflight, Ready
from gnnsys.launch.process_keeper import KILL_SECONDS
from gnnsys.launch.programs import for_torchrun

EXIT_NOT_STARTED = 2  # a host is not as it should be
EXIT_HOST_LOST = 75  # a host was lost: to try again may help (EX_TEMPFAIL)
KEPT_LINES, KEPT_LETTERS = 200, 4000  # of each rank, for the traceback; of each of these lines
IDLE_SECONDS = 2.0  # that an agent without a job has to end
FOLLOW_SECONDS = 3.0  # that other hosts have to fail by themselves once one has


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a job is launched. Seconds: `lost_after` of silence a host counts as dead, `grace` to end after SIGTERM,
    `connect_timeout` for ssh, `wait_for_hosts` until a lost host must be back. `ssh` None: agents run here.
    `parts_digest`: of the manifest whose parts hosts are told to serve; None: any. `plan`: for `gnnsys.open`."""

    ssh: tuple[str, ...] | None = ("ssh",)
    restarts: int = 0
    lost_after: float = 30.0
    grace: float = 15.0
    connect_timeout: float = 20.0
    wait_for_hosts: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    is_module: bool = False
    parts_digest: int | None = None
    plan: str | None = None

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"--restarts must be at least 0, got {self.restarts}")
        for name in ("lost_after", "grace", "connect_timeout", "wait_for_hosts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0 seconds, got {getattr(self, name)}")


@dataclass(frozen=True)
class RankFailure:
    """A rank that failed. `code` is negative for a signal; `time` is by the launcher's clock."""

    host: str
    rank: int
    local_rank: int
    code: int
    time: float


@dataclass(frozen=True)
class GroupEnd:
    """How one life of the group ended. `lost`: why a host was lost; `refused`: why one did not start the job; `words`:
    last lines of the first failing rank."""

    code: int
    failure: RankFailure | None = None
    lost: str | None = None
    refused: str | None = None
    words: tuple[str, ...] = ()
    may_restart: bool = True


class HostGroup:
    """The agents of one life of a job."""

    def __init__(
        self, hosts: Sequence[Host], options: LaunchOptions, say: Callable[[str, bool], None], launch: str = ""
    ) -> None:
        """`launch`: the same for all lives of a job."""
        self._hosts, self._options, self._say, self._launch = hosts, options, say, launch
        self._channels: list[AgentChannel] = []
        self._events: LineQueue[tuple[Host, dict[str, Any] | None]] = LineQueue()
        self._ahead: dict[str, tuple[float, float]] = {}  # a host's clock: seconds ahead, and the error of that
        self._words: dict[int, deque[str]] = {}
        self._ended: dict[str, int] = {}
        self._started: set[str] = set()  # hosts that were asked to start the job, and have not refused
        self._failures: list[RankFailure] = []

    # --- before the start

    def connect(self, checks: Checks, patience: float, *, verify: bool, is_restart: bool = False) -> Ready:
        """Starts an agent on every host and looks at all of them. Hosts that cannot be reached may have `patience`."""
        facts: dict[str, Any] = {}
        deadline, missing = time.monotonic() + patience, list(self._hosts)
        while True:
            failed = self._greet(missing, checks.script, facts)
            if not failed or time.monotonic() >= deadline:
                break
            missing = [host for host in missing if host.name in failed]
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))  # between two tries of ssh
        if not failed and is_restart:
            failed = self._await_earlier()
        if failed:
            remedy = "start it, or take it out of the hosts file; try ssh to it by hand"
            found = [Finding(name, why, remedy) for name, why in failed.items()]
            return Ready(findings=found)
        self._channels.sort(key=lambda channel: [host.name for host in self._hosts].index(channel.host.name))
        own = Checks(**{**vars(checks), "verify": verify})
        launcher = None if self._options.ssh is None else versions()
        return Preflight(self._channels, own, self._clock_error).run(facts, launcher)

    def _greet(self, hosts: Sequence[Host], script: str | None, facts: dict[str, Any]) -> dict[str, str]:
        """Connects to hosts, all at once, and adds what they say of themselves to `facts`; by name, why one failed."""
        options, failed = self._options, {}
        asked = []
        for host in hosts:
            command = agent_command(host, options.ssh, options.lost_after, options.connect_timeout)
            try:
                channel = AgentChannel(host, command, self._hear, lost_after=options.lost_after)
                self._channels.append(channel)
                asked.append((channel, channel.ask("hello", patience=options.lost_after, script=script)))
            except HostLost as error:
                failed[host.name] = error.why
        deadline = time.monotonic() + options.connect_timeout
        for channel, future in asked:
            try:
                answer = channel.result(future, max(0.1, deadline - time.monotonic()))
                facts[channel.host.name] = answer
                self._measure_clock(channel)
            except (HostLost, HostError) as error:
                failed[channel.host.name] = error.why
        for channel in [channel for channel in self._channels if channel.host.name in failed]:
            self._channels.remove(channel)
            channel.close(1.0)
        self._events.clear()  # ends of channels that have been dealt with
        return failed

    def _await_earlier(self) -> dict[str, str]:
        """Has every host wait until nothing is left there of the job's life before; by name, why that failed."""
        options, failed = self._options, {}
        patience = options.lost_after + options.grace + 2 * KILL_SECONDS  # of an agent that was cut off, of its keeper
        asked = []
        for channel in self._channels:
            try:
                asked.append((channel, channel.ask("await_earlier", launch=self._launch, patience=patience)))
            except HostLost as error:
                failed[channel.host.name] = error.why
        for channel, future in asked:
            try:
                channel.result(future, patience + options.lost_after)
            except (HostLost, HostError) as error:
                failed[channel.host.name] = error.why
        return failed

    def _hear(self, host: Host, message: dict[str, Any] | None) -> None:
        if message is not None and message["event"] == "line":
            self._events.put_line((host, message), len(message["text"]))
        else:
            self._events.put((host, message))

    def _measure_clock(self, channel: AgentChannel) -> None:
        begin = time.time()
        there = channel.result(channel.ask("ping"), self._options.connect_timeout)["time"]
        end = time.time()
        self._ahead[channel.host.name] = (there - (begin + end) / 2, (end - begin) / 2)

    def _clock_error(self, channel: AgentChannel) -> float:
        ahead, error = self._ahead[channel.host.name]
        return max(0.0, ahead - error) or min(0.0, ahead + error)

    def ask(self, do: str, arguments: Mapping[str, Mapping[str, Any]], timeout: float) -> dict[str, Any]:
        """Has hosts do something, all at once; their answers. `arguments`: by the name of each host that is asked.

        HostLost or HostError for the first that fails, after `connect` found nothing wrong.
        """
        channels = {channel.host.name: channel for channel in self._channels}
        asked = {name: channels[name].ask(do, **given) for name, given in arguments.items()}
        deadline = time.monotonic() + timeout
        return {
            name: channels[name].result(future, max(0.1, deadline - time.monotonic())) for name, future in asked.items()
        }

    def links(self, seconds: float) -> list[LinkSpeed]:
        """Measures from each host to the next, one link at a time; after `connect` found nothing wrong."""
        channels, found, patience = self._channels, [], self._options.connect_timeout
        if len(channels) < 2:
            return []
        ports = [channel.result(channel.ask("listen_probe"), patience) for channel in channels]
        for number, channel in enumerate(channels):
            there = (number + 1) % len(channels)
            target = channels[there].host
            asked = channel.ask("measure_link", address=target.address, port=ports[there], seconds=seconds)
            answer = channel.result(asked, patience + PATIENCE + 4 * seconds)  # amounts double
            found.append(LinkSpeed(channel.host.name, target.name, answer["rate"], answer["round_trip"]))
        return found

    # --- the job

    def run(self, ready: Ready, command: Sequence[str]) -> GroupEnd:
        """Starts torchrun on all hosts and waits for its end."""
        job, first = secrets.token_hex(4), self._channels[0].host
        try:
            asked = []
            told = self._assistants(ready)
            for number, channel in enumerate(self._channels):
                place = torchrun_options(self._num_with_ranks, number, ready.num_ranks[number], first, ready.port)
                arguments = [*place, f"--rdzv-id={job}", *script_words(self._options, command)]
                env = rank_env(channel.host, self._options) | told
                self._started.add(channel.host.name)
                own = {"arguments": None if channel.host.assists else arguments, "env": env}
                asked.append(channel.ask("start", **own, grace=self._options.grace, launch=self._launch))
            refused = [why for why in map(self._refusal, self._channels, asked) if why is not None]
        except HostLost as error:
            return self._lost(f"{error.host.name} was lost: {error.why.removeprefix('lost: ')}")
        if refused:
            self.stop()
            return GroupEnd(EXIT_NOT_STARTED, refused=refused[0], may_restart=False)
        return self._watch()

    @property
    def _num_with_ranks(self) -> int:
        return sum(not channel.host.assists for channel in self._channels)

    def _assistants(self, ready: Ready) -> dict[str, str]:
        """What all are told of hosts without ranks: where these listen, and the key of this life of the job."""
        hosts = [(each.host, port) for each, port in zip(self._channels, ready.ports, strict=True) if each.host.assists]
        if not hosts:
            return {}
        from gnnsys.comm import endpoint  # imports torch
        from gnnsys.session import ASSISTANTS, Assistants

        endpoints = {host.name: endpoint(host.address, port) for host, port in hosts}
        return {ASSISTANTS: Assistants.with_new_key(endpoints).text()}

    def _refusal(self, channel: AgentChannel, start: Future[Any]) -> str | None:
        try:
            channel.result(start, self._options.lost_after)
        except HostError as error:
            self._started.discard(channel.host.name)
            return str(error)
        return None

    def _watch(self) -> GroupEnd:
        follow: float | None = None  # until when the other hosts may fail by themselves
        with_ranks = {channel.host.name for channel in self._channels if not channel.host.assists}
        while not with_ranks <= self._ended.keys():
            if silent := self._silent():
                return self._lost(silent)
            if follow is not None and time.monotonic() >= follow:
                break
            wait = self._options.lost_after / 4
            if follow is not None:
                wait = max(0.0, min(wait, follow - time.monotonic()))
            try:
                host, message = self._events.get(timeout=wait)
            except queue.Empty:
                continue
            if message is None:
                if host.name not in self._ended:
                    return self._lost(f"{host.name} was lost: its connection ended")
            elif message["event"] == "line":
                self._line(host, message)
            elif message["event"] == "ended":
                self._end(host, message)
                if message["code"] and follow is None:
                    follow = time.monotonic() + FOLLOW_SECONDS
        self.stop()
        return self._outcome()

    def _silent(self) -> str | None:
        for channel in self._channels:
            if channel.host.name not in self._ended and channel.silent_for > self._options.lost_after:
                return f"{channel.host.name} was lost: it has been silent for {channel.silent_for:.0f} s"
        return None

    def _line(self, host: Host, message: Mapping[str, Any]) -> None:
        rank, is_error = message["rank"], message["stream"] == "err"
        if rank is None:
            self._say(f"{host.name} | {message['text']}", is_error)
            return
        if is_error:
            self._words.setdefault(rank, deque(maxlen=KEPT_LINES)).append(message["text"][:KEPT_LETTERS])
        self._say(f"{host.name}:{rank} | {message['text']}", is_error)

    def _end(self, host: Host, message: Mapping[str, Any]) -> None:
        self._ended[host.name] = int(message["code"])
        ahead = self._ahead[host.name][0]
        for each in message["failures"]:
            at = float(each["time"]) - ahead
            self._failures.append(RankFailure(host.name, each["rank"], each["local_rank"], each["code"], at))

    def _outcome(self) -> GroupEnd:
        names = [channel.host.name for channel in self._channels if not channel.host.assists]
        if all(self._ended.get(name) == 0 for name in names):  # the others were told to end
            return GroupEnd(0)
        if not self._failures:
            code = next((code for code in self._ended.values() if code), 1)
            return GroupEnd(code)
        first = min(self._failures, key=lambda failure: failure.time)
        code = first.code if first.code >= 0 else 128 - first.code
        return GroupEnd(code, first, words=traceback_of(self._words.get(first.rank, ())))

    def _lost(self, why: str) -> GroupEnd:
        self.stop()
        return GroupEnd(EXIT_HOST_LOST, lost=why)

    # --- the end

    def stop(self) -> None:
        """Ends the job on every host that still has it, and hears what it says last."""
        for channel in self._channels:
            if self._has_job(channel):
                with contextlib.suppress(HostLost):
                    channel.tell(do="stop")
        gone = {channel.host.name for channel in self._channels if not channel.is_open}
        deadline = time.monotonic() + self._options.grace + self._options.lost_after
        names = {channel.host.name for channel in self._channels if self._has_job(channel)}
        while not names <= self._ended.keys() | gone and time.monotonic() < deadline and not self._all_silent(gone):
            try:
                host, message = self._events.get(timeout=self._options.lost_after / 4)
            except queue.Empty:
                continue
            if message is None:
                gone.add(host.name)
            elif message["event"] == "line":
                self._line(host, message)
            elif message["event"] == "ended":
                self._end(host, message)

    def _all_silent(self, gone: set[str]) -> bool:
        """Whether nothing can be expected of those that have not ended."""
        left = [c for c in self._channels if self._has_job(c) and c.host.name not in gone]
        return all(channel.silent_for > self._options.lost_after for channel in left)

    def _has_job(self, channel: AgentChannel) -> bool:
        return channel.host.name in self._started and channel.host.name not in self._ended

    def _patience(self, channel: AgentChannel) -> float:
        """Seconds that an agent has to end. One that has a job ends it first, if it hears anything."""
        if not self._has_job(channel):
            return IDLE_SECONDS
        is_silent = channel.silent_for > self._options.lost_after
        return CLOSE_SECONDS if is_silent else self._options.grace + KILL_SECONDS + CLOSE_SECONDS

    def close(self) -> None:
        self._events.close_to_lines()
        closing = [threading.Thread(target=each.close, args=(self._patience(each),)) for each in self._channels]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def torchrun_options(num_hosts: int, number: int, num_ranks: int | str, first: Host, port: int | str) -> list[str]:
    """What torchrun on host `number` is told: all meet at the first. A restart is that of a fresh torchrun."""
    place = [f"--nnodes={num_hosts}", f"--node-rank={number}", f"--nproc-per-node={num_ranks}"]
    place += [f"--master-addr={first.address}", f"--master-port={port}"]
    return [*place, "--rdzv-backend=static", "--max-restarts=0"]


def script_words(options: LaunchOptions, command: Sequence[str]) -> list[str]:
    return [*(["-m"] if options.is_module else []), *for_torchrun(command)]


def rank_env(host: Host, options: LaunchOptions) -> dict[str, str]:
    """Variables of a host's ranks, beside torchrun's own. `gnnsys.open` heeds the parts and the plan."""
    env = {"GNNSYS_LAUNCH_HOST": host.name}
    if host.parts is not None:
        scope = "" if options.parts_digest is None else f"{options.parts_digest:08x}:"
        env["GNNSYS_SERVE_PARTS"] = scope + ",".join(map(str, host.parts))
    if options.plan is not None:
        env["GNNSYS_PLAN"] = options.plan
    return {**env, **options.env}


def traceback_of(words: Sequence[str]) -> tuple[str, ...]:
    """The last traceback in what a rank said, or its last lines."""
    lines = list(words)
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return tuple(lines[begins[-1] :] if begins else lines[-20:])
