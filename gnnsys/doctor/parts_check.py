"""A directory of parts as this machine would serve it: readable, whole, by whose ids, on which disk, and whether memory
holds it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gnnsys.doctor.diagnosis import ADVICE, FAILS, Diagnosis
from gnnsys.launch import file_problem, folders_there, read_listing
from gnnsys.observe import format_size

CHECKED_BYTES = 256 << 20  # that checksums are computed of: a second or so
NETWORK_DISKS = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|ceph|gpfs|beegfs|glusterfs|afs|wekafs|pvfs2|orangefs|9p|virtiofs|fuse\.(?!fuse-overlayfs).*"
)


@dataclass(frozen=True, kw_only=True)
class PartsFacts:
    """`parts`: those whose folders are here, of `num_parts`. `problem`: of the manifest; `problems`: of files.

    `size`: bytes of the parts that are here; `checked`: bytes that were compared with their checksums. `finds_nodes`
    and `finds_edges`: whether the parts know the user's own ids.
    """

    path: str
    num_parts: int = 0
    parts: tuple[int, ...] = ()
    num_files: int = 0
    size: int = 0
    checked: int = 0
    problem: str | None = None
    problems: tuple[str, ...] = ()
    unfit_rows: tuple[str, ...] = ()  # arrays of features with NaN
    disk: str | None = None  # type of the file system
    finds_nodes: bool = True
    finds_edges: bool = True


def read_parts(path: str) -> PartsFacts:
    """Sizes of all files are compared with the manifest, and checksums of the small ones, up to `CHECKED_BYTES`."""
    folder = Path(path)
    try:
        listing = read_listing(folder)
    except ValueError as error:
        return PartsFacts(path=path, problem=" ".join(str(error).partition(": make parts")[0].split()))
    parts = folders_there(listing)
    files, checked, problems = listing.of_parts(parts), 0, []
    for file in sorted(files, key=lambda each: each.bytes):
        verify = checked + file.bytes <= CHECKED_BYTES
        try:
            why = file_problem(folder, file, verify=verify)
            if not os.access(folder / file.name, os.R_OK):
                why = why or f"{folder / file.name} may not be read by this account"
        except OSError as error:
            why = f"{folder / file.name} cannot be read: {error.strerror}"
        problems += [why] if why else []
        checked += file.bytes if verify else 0
    return PartsFacts(
        path=path,
        num_parts=listing.num_parts,
        parts=tuple(parts),
        num_files=len(files),
        size=sum(file.bytes for file in files),
        checked=checked,
        problems=tuple(problems),
        unfit_rows=listing.unfit_rows,
        disk=disk_of(folder.resolve(), Path("/proc/self/mountinfo")),
        finds_nodes=listing.finds_nodes,
        finds_edges=listing.finds_edges,
    )


def judge_parts(facts: PartsFacts, usable_memory: int | None) -> list[Diagnosis]:
    """`usable_memory`: bytes that the page cache may get."""
    if facts.problem is not None:
        remedy = f"gnnsys partition SOURCE --out {facts.path} makes parts, gnnsys push brings them to hosts"
        return [Diagnosis("parts", facts.problem, "nothing can be opened there", remedy, FAILS)]
    found = [_judge_files(facts)]
    if facts.unfit_rows:
        more = f", and {len(facts.unfit_rows) - 1} more arrays" if len(facts.unfit_rows) > 1 else ""
        said, why = f"{facts.unfit_rows[0]}{more}", "a model that reads such rows computes NaN"
        remedy = "replace the values (torch.nan_to_num) and partition again"
        found.append(Diagnosis("features", said, why, remedy, ADVICE))
    if facts.parts:
        found += [_judge_ids(facts), _judge_disk(facts), _judge_page_cache(facts, usable_memory)]
    return found


def _judge_files(facts: PartsFacts) -> Diagnosis:
    remedy = f"gnnsys push {facts.path} --hosts FILE brings parts, and replaces files that are damaged"
    if not facts.parts:
        return Diagnosis(
            "parts", f"{facts.path} has a manifest and no part", "there is nothing to serve", remedy, FAILS
        )
    if facts.problems:
        more = f" and {len(facts.problems) - 1} more" if len(facts.problems) > 1 else ""
        return Diagnosis("parts", f"{facts.problems[0]}{more}", "parts with such files are refused", remedy, FAILS)
    here = "all" if len(facts.parts) == facts.num_parts else ",".join(map(str, facts.parts))
    compared = "all of them" if facts.checked == facts.size else f"{format_size(facts.checked)} of them"
    said = f"{here} of {facts.num_parts} parts, {facts.num_files} files of {format_size(facts.size)}"
    return Diagnosis("parts", f"{said}; sizes agree, and checksums of {compared}")


def _judge_ids(facts: PartsFacts) -> Diagnosis:
    edges = "edges too" if facts.finds_edges else "of edges they were left out"
    if facts.finds_nodes:
        return Diagnosis("parts' ids", f"graph.from_original looks up your ids of nodes; {edges}")
    why = "graph.from_original reads the ids of all nodes each time, and negatives of links are refused"
    remedy = f"gnnsys partition SOURCE --out {facts.path} writes parts that have it"
    return Diagnosis("parts' ids", f"no table of your ids of nodes; {edges}", why, remedy, ADVICE)


def _judge_disk(facts: PartsFacts) -> Diagnosis:
    if facts.disk is not None and NETWORK_DISKS.fullmatch(facts.disk):
        said, why = f"{facts.disk}, a network disk", "rows that memory does not hold cross the network at every read"
        remedy = f"gnnsys push {facts.path} --hosts FILE --to DIR, on a local disk"
        return Diagnosis("parts' disk", said, why, remedy, ADVICE)
    return Diagnosis("parts' disk", "of unknown type" if facts.disk is None else f"{facts.disk}, a local one")


def _judge_page_cache(facts: PartsFacts, usable_memory: int | None) -> Diagnosis:
    subject = "page cache"
    if usable_memory is None:
        return Diagnosis(subject, "the kernel does not say how much memory is free")
    said = f"{format_size(facts.size)} of parts, {format_size(usable_memory)} of memory to hold them"
    if facts.size > usable_memory:
        why = "mapped files are read from disk again and again"
        return Diagnosis(subject, said, why, "serve fewer parts on this host, or give it more memory", ADVICE)
    return Diagnosis(subject, said)


def disk_of(path: Path, mounts: Path) -> str | None:
    """The type of the file system that a path is on: that of the longest mount point above it, the last of equals."""
    best, kind = -1, None
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
        if len(point) >= best and (path == Path(point) or Path(point) in path.parents):
            best, kind = len(point), after.split()[0]
    return kind
