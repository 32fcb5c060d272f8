"""Queue training jobs, and run many of them on one device.

A job is MODULE:FUNCTION, which returns a TrainingJob, or any script. Submitting needs no service; `serve` runs what was
submitted (docs/jobs.md). The queue is a folder: --queue, or $GNNSYS_JOBS, or ~/.gnnsys/jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnsys.jobs import Queue

_LEAST_BYTES = 1 << 20  # no job takes less


class _ActionParser(argparse.ArgumentParser):
    """Gives `words` what stands behind `--`. argparse does so only where no option stands between script and `--`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if all(action.dest != "words" for action in self._actions):
            return super().parse_known_args(args, namespace)
        line = list(sys.argv[1:] if args is None else args)
        end = line.index("--") if "--" in line else len(line)
        found, unknown = super().parse_known_args(line[:end], namespace)
        if unknown:
            remedy = f"words of a script stand behind --: {found.target} -- {unknown[0]} ..."
            if ":" in found.target:
                remedy = "arguments of a function are JSON: --args '{\"lr\": 0.1}'"
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
        found.words = [*found.words, *line[end + 1 :]]
        return found, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_ActionParser)

    def action(name: str, words: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=words, description=words)
        made.add_argument("--queue", metavar="DIR", help="the queue's folder (default: $GNNSYS_JOBS, ~/.gnnsys/jobs)")
        return made

    submit = action("submit", "add one job")
    sweep = action("sweep", "add a job per combination of a grid")
    for each in (submit, sweep):
        _add_job_options(each)
    sweep.add_argument("--grid", nargs="+", metavar="NAME=V,V", required=True, help="such as lr=.1,.01 hidden=64,256")
    sweep.add_argument("--seeds", type=int, default=1, metavar="N", help="each combination with so many seeds (1)")
    submit.add_argument("--seed", type=int, default=0, metavar="N", help="of torch, numpy and random (0)")
    listed = action("list", "show the jobs")
    listed.add_argument("--state", help="queued, running, done, failed or cancelled")
    listed.add_argument("--sweep", type=int, metavar="JOB", help="the sweep that began with this job")
    listed.add_argument("--table", action="store_true", help="arguments and results side by side")
    listed.add_argument("--json", action="store_true", help="everything, a line of JSON per job")
    show = action("show", "show all of one job")
    logs = action("logs", "print what a job has printed")
    cancel = action("cancel", "cancel jobs")
    wait = action("wait", "wait until jobs have ended; exit code 1 where one has not ended well")
    for each in (show, logs):
        each.add_argument("job", type=int, metavar="JOB")
    show.add_argument("--json", action="store_true", help="as JSON")
    cancel.add_argument("jobs", type=int, nargs="*", metavar="JOB")
    cancel.add_argument("--sweep", type=int, metavar="JOB", help="all of the sweep that began with this job")
    wait.add_argument("jobs", type=int, nargs="*", metavar="JOB", help="(default: all)")
    wait.add_argument("--timeout", type=float, metavar="SECONDS", help="(default: none)")
    _add_serve_options(action("serve", "run the jobs, until it is interrupted"))


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:FUNCTION|SCRIPT", help="such as train:job, or train.py")
    parser.add_argument("words", nargs="*", metavar="WORD", help="words of a script, behind --")
    parser.add_argument("--args", metavar="JSON", default="{}", help="a function's arguments, as '{\"hidden\": 256}'")
    parser.add_argument("--memory", metavar="SIZE", help="6G: what it takes (default: it is estimated, or measured)")
    parser.add_argument("--dir", metavar="DIR", help="where it runs (default: here)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the job; repeatable")
    parser.add_argument("--checkpoint-steps", type=int, metavar="N", help="save a function job every N steps")
    parser.add_argument("--checkpoint-seconds", type=float, metavar="S", help="save a function job every S seconds")
    parser.add_argument("--no-weights", action="store_true", help="do not keep the trained weights")
    parser.add_argument("--key", help="submit nothing where this key was given before")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--capacity", metavar="SIZE", help="26G: what jobs may take together (default: most of it)")
    parser.add_argument("--workers", type=int, metavar="N", help="jobs at a time (default: 2 to 4 on a GPU, else 2)")
    parser.add_argument("--threads", type=int, metavar="N", help="of each worker (default: its share of the cores)")
    parser.add_argument("--sharing", default="auto", help="of a GPU: mps, slices, or auto, which is MPS if possible")
    parser.add_argument("--policy", default="continuous", help="continuous, fifo, lmcf, bmc or base (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="start a process per job, to compare")
    parser.add_argument("--until-empty", action="store_true", help="end when all jobs have ended")


def run(args: argparse.Namespace) -> int:
    from gnnsys.jobs import Queue, default_folder

    folder = args.queue or default_folder()
    if args.action == "serve":
        return _serve(args, str(folder))
    with Queue(folder, is_new=args.action in ("submit", "sweep")) as queue:
        return int(_ACTIONS[args.action](args, queue))


def _job_options(args: argparse.Namespace) -> dict[str, Any]:
    environment = {}
    for text in args.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--env takes NAME=VALUE, got {text!r}")
        environment[name] = value
    try:
        arguments = json.loads(args.args)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--args must be JSON, such as '{{\"hidden\": 256}}', got {args.args!r}: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"--args must be a JSON object, such as '{{\"hidden\": 256}}', got {args.args!r}")
    return {
        "arguments": arguments, "words": args.words, "memory": _size("--memory", args.memory), "folder": args.dir,
        "environment": environment, "checkpoint_steps": args.checkpoint_steps,
        "checkpoint_seconds": args.checkpoint_seconds, "keeps_weights": not args.no_weights, "key": args.key,
    }  # fmt: skip


def _size(option: str, text: str | None) -> str | None:
    """ValueError for a number without a unit that is too small to be bytes."""
    if text is not None and text.strip().isdigit() and int(text) < _LEAST_BYTES:
        raise ValueError(f"{option} {text} is {text} bytes: write its unit, such as {text.strip()}G")
    return text


def _submit(args: argparse.Namespace, queue: Queue) -> int:
    number = queue.submit(args.target, seed=args.seed, **_job_options(args))
    print(f"job {number} of {queue.folder.path}")
    return 0


def _sweep(args: argparse.Namespace, queue: Queue) -> int:
    from gnnsys.jobs import parse_grid

    numbers = queue.sweep(args.target, parse_grid(args.grid), args.seeds, **_job_options(args))
    which = f"job {numbers[0]}" if len(numbers) == 1 else f"jobs {numbers[0]} to {numbers[-1]}"
    print(f"{which} of {queue.folder.path}")
    return 0


def _list(args: argparse.Namespace, queue: Queue) -> int:
    from gnnsys.jobs import job_json, job_lines, result_lines

    jobs = queue.list(args.state, args.sweep)
    if args.json:
        for job in jobs:
            print(json.dumps(job_json(job)))
    else:
        _print((result_lines if args.table else job_lines)(jobs))
    return 0


def _show(args: argparse.Namespace, queue: Queue) -> int:
    from gnnsys.jobs import job_json, job_page

    job = queue.show(args.job)
    _print([json.dumps(job_json(job), indent=1)] if args.json else job_page(job))
    return 0


def _logs(args: argparse.Namespace, queue: Queue) -> int:
    sys.stdout.write(queue.logs(args.job))
    return 0


def _cancel(args: argparse.Namespace, queue: Queue) -> int:
    numbers = list(args.jobs)
    if args.sweep is not None:
        found = [job.number for job in queue.list(sweep=args.sweep)]
        if not found:
            raise ValueError(f"no sweep began with job {args.sweep}: gnnsys jobs show JOB says of which a job is")
        numbers += found
    if not numbers:
        raise ValueError("nothing to cancel: give the numbers of jobs, or --sweep with the first number of a sweep")
    states = queue.cancel(numbers)
    for number, state in zip(numbers, states, strict=True):
        print(f"job {number}: {'is asked to end' if state == 'running' else state}")
    return 0


def _wait(args: argparse.Namespace, queue: Queue) -> int:
    from gnnsys.jobs import job_lines

    left = [job for job in queue.list() if not job.state.is_over and job.number in (args.jobs or [job.number])]
    if left:
        words = "1 job" if len(left) == 1 else f"{len(left)} jobs"
        print(f"waiting for {words}: gnnsys jobs serve runs what is queued", file=sys.stderr, flush=True)
    jobs = queue.wait(args.jobs or None, args.timeout)
    _print(job_lines(jobs))
    return int(any(job.state != "done" for job in jobs))


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines))


def _serve(args: argparse.Namespace, folder: str) -> int:
    import logging
    import signal
    import threading

    from gnnsys.jobs import DeviceFacts, JobService, job_lines
    from gnnsys.observe import format_size

    device = args.device or DeviceFacts.ask_default().device
    if args.sharing == "mps" and device == "cpu":
        raise ValueError("--sharing mps is for a GPU: add --device cuda, or leave --sharing away")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    service = JobService(
        folder, device=device, capacity=_size("--capacity", args.capacity), workers=args.workers,
        threads=args.threads, is_warm=not args.cold, policy=args.policy, device_sharing=args.sharing,
    )  # fmt: skip
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with service:
        workers, size = service.room.workers, format_size(service.room.capacity)
        print(f"serving {service.folder.path}: {workers} at a time, {size} of {service.device}", flush=True)
        ended = []
        if args.until_empty:
            ended = service.run_until_empty(stop=stop)
        else:
            service.serve(stop)
    with _queue(folder) as queue:
        if args.until_empty:
            _print(job_lines([queue.show(job.number) for job in ended]))
        if left := _left(queue):
            print(left)
    if not args.until_empty:
        return 0
    return 130 if stop.is_set() else int(any(job.state != "done" for job in ended))


def _left(queue: Queue) -> str:
    """What a service leaves to the next one."""
    waiting, running = len(queue.list("queued")), len(queue.list("running"))
    told = [f"{waiting} wait for the next service"] * (waiting > 0) + [f"{running} scripts go on"] * (running > 0)
    return f"jobs: {', '.join(told)}" if told else ""


def _queue(folder: str) -> Queue:
    from gnnsys.jobs import Queue

    return Queue(folder)


_ACTIONS = {
    "submit": _submit,
    "sweep": _sweep,
    "list": _list,
    "show": _show,
    "logs": _logs,
    "cancel": _cancel,
    "wait": _wait,
}
