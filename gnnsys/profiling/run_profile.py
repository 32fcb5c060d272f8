"""A job profile from what a run has recorded: `loader.save_trace` on every rank, `gnnsys profile --trace`.

Flows and service times are the run's own. What a rank had on its own machine never was a message: its bytes are told by
the rows that were read there, and its work is in the rank's own. Times are of the machines that the run was on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gnnsys.graph import MANIFEST
from gnnsys.loader import RunTrace
from gnnsys.observe import BatchTrace
from gnnsys.partition import Parts, open_parts
from gnnsys.planning import FLOWS, PULLED, WORK, ByteWork, JobGradients, JobProfile, ShareProfile
from gnnsys.profiling.dry_run import flow_kind

MOST_BATCHES = 50
_SIZE_OF_ID = 8


def profile_of_traces(path: str | os.PathLike[str], traces: Sequence[str | os.PathLike[str]]) -> JobProfile:
    """ValueError where the traces are not those of all ranks of one run on these parts, or have no whole batch."""
    folder = Path(path)
    parts = open_parts(folder, verify=False)
    digest = zlib.crc32((folder / MANIFEST).read_bytes())
    found = [RunTrace.from_file(trace) for trace in traces]
    _check(found, traces, digest, folder)
    for trace, name in zip(found, traces, strict=True):
        if not _whole(trace):
            raise ValueError(f"{name}: it has no batch that was trained on: train some before you save the trace")
    found.sort(key=lambda trace: trace.share)
    whole = [_whole(trace) for trace in found]
    num_batches = min(MOST_BATCHES, min(map(len, whole)))
    made = [_share(trace, records[-num_batches:], parts) for trace, records in zip(found, whole, strict=True)]
    first = found[0]
    pushed = np.mean([push for _, push in made], axis=0)
    return JobProfile(
        parts_digest=digest,
        num_parts=parts.num_parts,
        trainers_per_part=parts.trainers_per_part,
        subpart_seeds=first.subpart_seeds,
        batch_size=first.batch_size,
        shares=tuple(share for share, _ in made),
        gradients=JobGradients(
            dense=float(max(trace.gradients for trace in found)),
            sparse=tuple(pushed.tolist()) if pushed.any() else (),
            pulled=tuple(pushed.tolist()) if pushed.any() else (),
        ),
        byte_work=ByteWork(),  # in the times of the stages and of the servers already
        part_bytes=tuple(sum(parts.stored_bytes(part).values()) for part in range(parts.num_parts)),
        ahead=first.ahead,
        in_flight=min(1, first.ahead),  # of no account: rows were as late as they were
        computes_on="cpu" if first.device == "cpu" else first.device.split(":")[0],
        source="run",
        about={"ranks": len(found), "machines": len(set(first.machine_of_part))},
    )


def _check(found: Sequence[RunTrace], paths: Sequence[Any], digest: int, folder: Path) -> None:
    for trace, path in zip(found, paths, strict=True):
        if trace.parts_digest != digest:
            raise ValueError(f"{path} is of parts with the digest {trace.parts_digest:08x}, {folder} has {digest:08x}")
        if (trace.world_size, trace.batch_size) != (found[0].world_size, found[0].batch_size):
            raise ValueError(f"{path} is of another run than {paths[0]}: give those of one, one for each rank")
    ranks = sorted(trace.rank for trace in found)
    if ranks != list(range(found[0].world_size)):
        raise ValueError(f"the run had ranks 0 to {found[0].world_size - 1}, and there are traces of {ranks}")


def _whole(trace: RunTrace) -> list[BatchTrace]:
    """Batches that were loaded and trained on to the end."""
    return [record for record in trace.records if "use" in record.cpu and "fetch" in record.cpu]


def _share(trace: RunTrace, records: Sequence[BatchTrace], parts: Parts) -> tuple[ShareProfile, np.ndarray]:
    """One rank's profile, and bytes that it pushed to each part in a step."""
    num_parts = parts.num_parts
    amounts: dict[str, Any] = {name: np.zeros((len(records), num_parts)) for name in FLOWS}
    amounts |= {name: np.zeros(len(records)) for name in WORK}
    pushed = np.zeros(num_parts)
    weights = _weights(trace, parts)
    here = [part for part, machine in enumerate(trace.machine_of_part) if machine == trace.machine]
    for at, record in enumerate(records):
        for flow in record.flows:
            of_part = weights[flow.machine]
            if flow.kind == "PUSH":
                pushed += flow.bytes_out * of_part / len(records)
                continue
            kind = flow_kind(flow.kind)
            amounts[f"{kind}_out"][at] += flow.bytes_out * of_part
            amounts[f"{kind}_in"][at] += flow.bytes_in * of_part
            amounts[f"{kind}_seconds"][at] += flow.served_us * 1e-6 * of_part
            amounts["requests"][at] += flow.requests * of_part
        _add_rows(amounts, at, record, trace, here, weights)
        amounts["seeds"][at] = record.num_seeds
        amounts["nodes"][at] = sum(sum(counts) for counts in record.nodes.values())
        amounts["batch_bytes"][at] = amounts["nodes"][at] * (trace.row_bytes + _SIZE_OF_ID) + 2 * _SIZE_OF_ID * sum(
            sum(counts) for counts in record.edges.values()
        )
        amounts["sampling"][at] = record.cpu.get("sample", 0.0) + record.cpu.get("compact", 0.0)
        amounts["fetching"][at] = record.cpu["fetch"]
        began, ended = record.stages["use"]
        amounts["computing"][at] = record.cpu["use"] if trace.device == "cpu" else ended - began
    for name in PULLED:  # as late as they came
        for prefix in ("home_", "late_", "home_late_"):
            amounts[f"{prefix}{name}"] = amounts[name]
    return ShareProfile(**amounts, home=tuple(here)), pushed


def _add_rows(
    amounts: dict[str, Any], at: int, record: BatchTrace, trace: RunTrace, here: Sequence[int],
    weights: dict[int, np.ndarray],
) -> None:  # fmt: skip
    """Rows by part: those of this machine by what was read there, the others by what the parts have sent. What would
    have been messages had the rank been elsewhere, is as many bytes for each row as those of others had."""
    edges = sum(sum(counts) for counts in record.edges.values())
    read = record.bytes.get("local", 0) / max(1, trace.row_bytes)
    away = (record.bytes.get("remote", 0) + record.bytes.get("shared", 0)) / max(1, trace.row_bytes)
    sent = amounts["pull_in"][at].sum()
    by_part = amounts["pull_in"][at] / sent * away if sent else np.zeros_like(amounts["pull_in"][at])
    if here and read:
        of_part = weights[trace.machine]
        ratio = read / away if away else 1.0
        amounts["sample_in"][at] += of_part * ratio * amounts["sample_in"][at].sum()
        amounts["sample_out"][at] += of_part * ratio * amounts["sample_out"][at].sum()
        amounts["pull_in"][at] += of_part * (ratio * sent if sent else read * trace.row_bytes)
        amounts["pull_out"][at] += of_part * (ratio * amounts["pull_out"][at].sum() if sent else read * _SIZE_OF_ID)
        by_part = by_part + of_part * read
    amounts["rows"][at] = by_part
    amounts["edges"][at] = edges * by_part / by_part.sum() if by_part.sum() else 0.0


def _weights(trace: RunTrace, parts: Parts) -> dict[int, np.ndarray]:
    """How what a machine sends is spread over its parts: by their nodes."""
    nodes = np.array(
        [sum(len(parts.book.part_range(part, t)) for t in parts.schema.node_types) for part in range(parts.num_parts)]
    )
    found = {}
    for machine in set(trace.machine_of_part):
        own = nodes * (np.array(trace.machine_of_part) == machine)
        found[machine] = own / max(1, own.sum())
    return found
