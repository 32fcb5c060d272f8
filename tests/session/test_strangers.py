"""Jobs beside each other on one host, of one user and of two: none is answered by another, or reads its memory."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

import torch

from gnnsys.store.shared_rows import SharedRows
from tests.support.processes import Running, await_shared_memory_freed, processes, shared_memory

DEADLINE = 180

JOB = """
import json, os, sys, time, torch, zmq
from gnnsys.comm import Client, Keys, Kind
from gnnsys.session.graph_server import GraphServer
from gnnsys.store import Store
from gnnsys.store.shared_rows import SharedRows

keys, number, user = Keys.generate(), int(sys.argv[1]), int(sys.argv[2])
questions = open(sys.argv[3])
if user != os.getuid():
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
server = GraphServer(0, keys=keys)
(endpoint,) = server.start()
client = Client({0: endpoint}, sender=0, incarnation=1, keys=keys, timeout=120)
store = Store(machine_of_part=[0], machine=0, client=client, rank=0, world_size=1)
store.create("scores", 10, (2,), init=float(number))
shared = client.request(0, Kind.DESCRIBE, options={"name": "scores"}).result().options["shared"]["0"]
print(json.dumps({"endpoint": endpoint, "keys": keys.to_json(), "shared": shared, "user": os.getuid()}), flush=True)
context, knockers = zmq.Context(), []
for line in questions:
    told = json.loads(line)
    if "end" in told:
        break
    if "refused" in told:  # tells once so many were turned away
        deadline = time.monotonic() + 120
        while server.server.counters()["refused_keys"] < told["refused"] and time.monotonic() < deadline:
            time.sleep(0.01)
        print(json.dumps(server.server.counters()["refused_keys"]), flush=True)
        continue
    # who has the key is answered
    with Client({0: endpoint}, sender=1, incarnation=1, keys=keys, timeout=120) as friend:
        control = friend.request(0, Kind.DESCRIBE, options={"name": "scores"}).result().options["shared"]["0"] == shared
    for each, public in zip(told["endpoints"], told["publics"]):
        knocking = context.socket(zmq.DEALER)  # knows their public half, and has a pair of its own
        knockers.append(knocking)
        knocking.curve_serverkey, knocking.linger = public.encode(), 0
        knocking.curve_publickey, knocking.curve_secretkey = keys.public.encode(), keys.secret.encode()
        knocking.connect(each)
    answered = []
    for each in told["endpoints"]:
        with Client({0: each}, sender=0, incarnation=1, keys=keys, timeout=0.5) as stranger:
            try:
                answered.append(stranger.request(0, Kind.DESCRIBE, options={"name": "scores"}).result().options)
            except Exception as error:
                answered.append(type(error).__name__)
    opened = [SharedRows.open(each, (10, 2), torch.float32) is not None for each in told["shared"]]
    own = store.tensor("scores")[torch.arange(10)].tolist()
    print(json.dumps({"answered": answered, "opened": opened, "own": own, "control": control}), flush=True)
client.close()
server.close()
context.destroy(linger=0)
"""


class Job:
    """One of them: it is asked through a pipe that has a name, and answers a line each time."""

    def __init__(self, running: Running, number: int, user: int) -> None:
        self._running, self._number, self._num_heard = running, number, 0
        pipe, program = (
            running.folder / f"questions-{number}",
            running.folder / f"job-{number}.py",
        )  # its own: a rank may still read it
        os.mkfifo(pipe)
        program.write_text(JOB)
        running.start_rank(number, program, [number, user, pipe], {})
        self._questions = os.fdopen(os.open(pipe, os.O_RDWR), "w")  # without waiting for its end, as for writing alone

    def tell(self, **question: object) -> None:
        self._questions.write(json.dumps(question) + "\n")
        self._questions.flush()

    def hear(self) -> Any:
        self._num_heard += 1
        printed = self._running.await_output(self._number, "\n", DEADLINE, times=self._num_heard)
        return json.loads(printed.splitlines()[self._num_heard - 1])


def test_jobs_of_one_user_and_of_two_on_one_host_never_see_each_other():
    me = os.getuid()
    users = [me, me, *([pwd.getpwnam("nobody").pw_uid] if me == 0 else [])]  # only root has another user to be
    with processes() as running:
        jobs = [Job(running, number, user) for number, user in enumerate(users)]
        told = [job.hear() for job in jobs]
        assert [each["user"] for each in told] == users
        for number, job in enumerate(jobs):
            others = [each for each in told if each is not told[number]]
            guesses = [each["shared"] | {"token": each["shared"]["token"] + 1} for each in others]
            if users[number] != me:
                guesses += [each["shared"] for each in others]  # even with everything that the owner knows
            publics = [each["keys"]["public"] for each in others]
            job.tell(endpoints=[each["endpoint"] for each in others], publics=publics, shared=guesses)
        for number, job in enumerate(jobs):  # all at once: each waits for answers that do not come
            found = job.hear()
            assert found["control"] and found["answered"] == ["DeadlineExceeded"] * (len(jobs) - 1)
            assert not any(found["opened"])
            assert found["own"] == [[float(number)] * 2] * 10
        for job in jobs:
            job.tell(refused=len(jobs) - 1)
        assert all(job.hear() >= len(jobs) - 1 for job in jobs)  # not late: turned away
        assert len({each["keys"]["public"] for each in told}) == len(jobs)
        for job in jobs:
            job.tell(end=True)
        assert [ended.returncode for ended in running.wait(DEADLINE)] == [0] * len(jobs)


def test_shared_memory_has_no_name_that_another_job_could_meet():
    before = shared_memory()
    made = SharedRows.create((1000, 4), torch.float32)
    await_shared_memory_freed(before)  # by others, which have some for a moment
    target = os.readlink(f"/proc/self/fd/{made.address()['fd']}")
    assert target.startswith("/memfd:") and not Path(target).exists()
    made.drop()
