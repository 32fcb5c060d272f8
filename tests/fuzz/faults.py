"""Single-bit and truncation faults in the files of a small directory of parts: every one is refused at open.

    python -m tests.fuzz.faults --faults 1000 --seed 0

With checksums the error names the file. Without them (verify=False) a fault may pass where it only changes values, and
then whatever is asked of the parts is answered or refused: what happens depends on (seed, number) alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from gnnsys.comm import Kind, Request
from gnnsys.partition import Parts, open_parts, write_parts
from gnnsys.sampling import GraphService
from gnnsys.sampling.hop_message import Draw, InnerDraw, InnerRequest, PartsRequest, Slot, SourceList
from gnnsys.sampling.layer_shares import WITH_SOURCES
from gnnsys.sampling.lookups import DEGREES, EDGE_IDS, ENDS
from tests.partition.part_graphs import heterogeneous, homogeneous, random_assignment


@dataclass(frozen=True)
class Fault:
    """A bit of a file turned over, or a file cut to a length."""

    file: Path
    bit: int | None = None
    length: int | None = None

    def apply(self, content: bytes) -> bytes:
        if self.bit is None:
            return content[: self.length]
        changed = bytearray(content)
        changed[self.bit // 8] ^= 1 << self.bit % 8
        return bytes(changed)

    def __str__(self) -> str:
        return f"{self.file}: " + (f"bit {self.bit} turned" if self.bit is not None else f"cut to {self.length} bytes")


def make_fault(seed: int, number: int, files: list[Path]) -> Fault:
    """Fault `number` of a run: any file is as likely as any other, the manifest twice as likely."""
    chance = random.Random(f"{seed}/{number}")
    file = chance.choice([*files, next(f for f in files if f.name == "manifest.json")])
    size = file.stat().st_size
    if chance.random() < 0.25:
        return Fault(file, length=chance.randrange(size))
    front = min(size, 128)  # an array's header is worth as much as its values
    return Fault(file, bit=chance.randrange(8 * (size if chance.random() < 0.7 else front)))


def parts_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)


def write_samples(folder: Path) -> list[Path]:
    """Two small directories of parts: one type with rows of every kind, and several types."""
    for name, graph in (("one", homogeneous(60, 250)), ("typed", heterogeneous())):
        write_parts(graph, random_assignment(graph, 2, 1), folder / name)
    return [folder / "one", folder / "typed"]


def use(parts: Parts) -> None:
    """Asks for all that a server answers; ValueError where something is refused."""
    for part in range(parts.num_parts):
        parts.part(part)
    service = GraphService(parts, range(parts.num_parts))
    halo = service.views.wanted(WITH_SOURCES)  # global ids: any int64 will do for original ones
    service.views.prepare(WITH_SOURCES, {where: ids.long() for where, ids in halo.items()})
    for number, (src, _, dst) in enumerate(parts.schema.edge_types):
        known = SourceList(torch.arange(parts.book.part_range(parts.num_parts - 1, src).stop), None)
        for part in range(parts.num_parts):
            nodes = torch.arange(parts.part(part).num_core(dst), dtype=torch.int32)
            edges = torch.arange(len(parts.book.part_range(part, parts.schema.edge_types[number])))
            slots = [Slot([nodes.numel()], nodes, None, None)]
            for fanout in (-1, 3):
                hop = PartsRequest(0, [part], slots, [Draw(number, 0, fanout, 5, [None])])
                list(service.sample(Request.local(Kind.SAMPLE, hop.to_arrays())))
            inner = InnerRequest([part], slots, [known], [InnerDraw(number, 0, 0, [None])])
            list(service.induced(Request.local(Kind.INDUCED, inner.to_arrays())))
            shares = [torch.tensor([WITH_SOURCES.key, number, part, nodes.numel()]), torch.tensor([1]), nodes]
            list(service.shares(Request.local(Kind.SHARES, shares)))
            for what, ids in ((ENDS, edges), (EDGE_IDS, edges), (DEGREES, nodes)):
                head = torch.tensor([what, number, part, ids.numel()])
                service.edge_ends(Request.local(Kind.EDGE_ENDS, [head, ids]))
            head = torch.tensor([number, part, 3, 0, 1])
            list(service.visits(Request.local(Kind.VISITS, [head, torch.ones(nodes.numel(), dtype=torch.float64)])))


def check(number: int, seed: int, folder: Path) -> str | None:
    """What is wrong with how a fault is met; None where it is refused as it should be."""
    fault = make_fault(seed, number, parts_files(folder))
    content = fault.file.read_bytes()
    try:
        fault.file.write_bytes(fault.apply(content))
        try:
            parts = open_parts(folder)
            for part in range(parts.num_parts):
                parts.part(part)
        except ValueError as error:
            if str(fault.file) not in str(error):
                return f"{fault}: refused without the file's name: {error}"
        else:
            return f"{fault}: opened"
        try:
            use(open_parts(folder, verify=False))
        except ValueError:
            pass
        except Exception as error:
            return f"{fault}: without checksums: {error!r}"
    finally:
        fault.file.write_bytes(content)
    return None


def check_all(num_faults: int, seed: int, folder: Path) -> list[str]:
    folders = write_samples(folder)
    for each in folders:
        use(open_parts(each))
    found = [check(number, seed, folders[number % 2]) for number in range(num_faults)]
    for each in folders:
        use(open_parts(each))  # every fault was undone
    return [problem for problem in found if problem is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gnnsys-faults-") as folder:
        problems = check_all(args.faults, args.seed, Path(folder))
    print(*problems, sep="\n")
    print(f"{args.faults} faults of seed {args.seed}: {args.faults - len(problems)} refused as they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
