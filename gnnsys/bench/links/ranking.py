"""Filtered ranks of both ends of every link, beside the loop that one would write: a link at a time, all scores of it.

Rows are small whole numbers, so that scores are exact in whatever order they are added up, and many are ties: both
sides must agree on every rank, ties included, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gnnsys.bench.case import OURS, Case, Side, Versus, megabytes, milliseconds
from gnnsys.bench.workload import FULL, SEED, Workload
from gnnsys.metrics import KnownLinks, rank_links
from gnnsys.nn import ComplEx, Decoder, DistMult, TransE

PLAIN = "a link at a time"
WHOLE = "all scores at once"
DIM, NUM_KINDS = 200, 237
ENDS: tuple[Literal["tail", "head"], ...] = ("tail", "head")
DECODERS: dict[str, Callable[[], Decoder]] = {
    "DistMult": lambda: DistMult(DIM, NUM_KINDS),
    "ComplEx": lambda: ComplEx(DIM, NUM_KINDS),
    "TransE": lambda: TransE(DIM, NUM_KINDS),
}


class Triples(NamedTuple):
    """Links to be ranked, among `num_entities`, and all that are known to be true."""

    num_entities: int
    test: Tensor  # [3, links]: head, relation, tail
    known: Tensor


def triples(work: Workload) -> Triples:
    """As many as FB15k-237 has; a few where sizes are small."""
    is_full = work.sizes.num_nodes >= FULL.num_nodes
    entities, tested, total = (14_541, 20_466, 310_116) if is_full else (200, 20, 2_000)
    generator = torch.Generator().manual_seed(SEED)
    ends = (torch.rand(2, total, generator=generator) ** 2 * entities).long()  # some entities have many links
    kinds = torch.randint(NUM_KINDS if is_full else 5, (total,), generator=generator)
    known = torch.stack([ends[0], kinds, ends[1]])
    return Triples(entities, known[:, :tested], known)


def ranks(work: Workload) -> Iterator[Case]:
    given = work.once("triples", lambda: triples(work))
    size = f"{given.num_entities} entities x {2 * given.test.shape[1]}"
    for name in DECODERS:

        def sides(name: str = name) -> dict[str, Side]:
            decoder, rows = exact(DECODERS[name](), given.num_entities)
            known = KnownLinks(given.known[0], given.known[2], given.known[1])
            return {
                OURS: Side(lambda: tiled(decoder, rows, given.test, known), 2, "synced"),
                PLAIN: Side(lambda: plain(decoder, rows, given), 2, "synced"),
            }

        yield Case(f"rank/{name}/{size}", milliseconds(), sides, (Versus((PLAIN,)),), agree=0.0, repeats=1)


def memory(work: Workload) -> Iterator[Case]:
    """Of the host: beside a number for every link and entity, of links and entities that fit."""
    given = work.once("triples", lambda: triples(work))
    some = given.test[:, : min(4096, given.test.shape[1])]

    def sides() -> dict[str, Side]:
        decoder, rows = exact(DECODERS["DistMult"](), given.num_entities, torch.device("cpu"))
        known = KnownLinks(given.known[0], given.known[2], given.known[1])

        def whole() -> Tensor:
            head, kind, _ = some
            return (decoder.score_all(rows[head].double(), rows.double(), kind) > 0).sum(1)

        return {OURS: Side(lambda: tiled(decoder, rows, some, known, ENDS[:1])), WHOLE: Side(whole)}

    name = f"rank/memory/{given.num_entities} entities x {some.shape[1]}"
    yield Case(name, megabytes(), sides, (Versus((WHOLE,)),), repeats=3)


def exact(decoder: Decoder, num_entities: int, device: torch.device | None = None) -> tuple[Decoder, Tensor]:
    """A decoder and rows of whole numbers."""
    generator = torch.Generator().manual_seed(SEED)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    rows = torch.randint(-2, 3, (num_entities, decoder.dim), generator=generator).float()
    rows[num_entities // 2 :: 7] = rows[0]  # the same row: ties, whatever the scores
    return decoder.to(device), rows.to(device)


def tiled(
    decoder: Decoder, rows: Tensor, links: Tensor, known: KnownLinks, ends: tuple[Literal["tail", "head"], ...] = ENDS
) -> Tensor:
    """Twice the ranks of all links, so that ties are whole numbers."""
    head, kind, tail = links
    found = [rank_links(decoder, rows, head, tail, kind, wanted=wanted, known=known) for wanted in ends]
    return torch.cat([2 * each.above + each.same for each in found])


@torch.no_grad()
def plain(decoder: Decoder, rows: Tensor, given: Triples) -> Tensor:
    """The same, as it is written down: scores of all entities, those known to be true left out, then count."""
    true: dict[tuple[str, int, int], list[int]] = {}
    for h, r, t in given.known.t().tolist():
        true.setdefault(("tail", h, r), []).append(t)
        true.setdefault(("head", t, r), []).append(h)
    rows, found = rows.double(), []
    for wanted in ENDS:
        for h, r, t in given.test.t().tolist():
            known, answer = (h, t) if wanted == "tail" else (t, h)
            kind = torch.tensor([r], device=rows.device)
            scores = decoder.score_all(rows[known].unsqueeze(0), rows, kind, wanted)[0]
            own = scores[answer].clone()
            scores[torch.tensor(true[wanted, known, r], device=rows.device)] = -torch.inf
            found.append(2 * (scores > own).sum() + (scores == own).sum())
    return torch.stack(found).cpu()


BENCHMARKS = [ranks, memory]
