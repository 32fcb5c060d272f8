"""A knowledge graph: rows of entities and relations, scored by DistMult, ComplEx, TransE or RotatE, ranked filtered.

python examples/knowledge_graph.py                                          # a small generated graph
python examples/knowledge_graph.py fb15k237.npz --model complex             # arrays edge_index, edge_type, edge_split
torchrun --nproc-per-node 2 examples/knowledge_graph.py fb15k237.npz        # each trainer has its share of the links
python examples/knowledge_graph.py fb15k237.npz --device cuda --negatives 0 # compared with all entities

Each link is trained twice: against other tails, and against other heads. What is measured is the rank of the true end
of held-out links among all entities, in which other true ends do not count (filtered, Bordes et al. 2013).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gnnsys
from gnnsys.metrics import KnownLinks, Ranking, rank_links
from gnnsys.nn import ComplEx, Decoder, DistMult, RotatE, TransE, self_adversarial_link_loss, softmax_link_loss

MODELS = {"distmult": DistMult, "complex": ComplEx, "transe": TransE, "rotate": RotatE}
DISTANCES = ("transe", "rotate")
End = Literal["head", "tail"]
ENDS: tuple[End, End] = ("tail", "head")


@dataclass
class Links:
    """`heads`, `kinds` and `tails` of all links, and whether each is of train (0), valid (1) or test (2)."""

    heads: Tensor
    kinds: Tensor
    tails: Tensor
    split: Tensor

    def of(self, split: int) -> tuple[Tensor, Tensor, Tensor]:
        chosen = self.split == split
        return self.heads[chosen], self.kinds[chosen], self.tails[chosen]

    @property
    def num_entities(self) -> int:
        return 1 + int(torch.cat([self.heads, self.tails]).max())


class KnowledgeModel(nn.Module):
    """Rows of entities, and a decoder that has those of relations.

    A step reads the rows it needs once. On the CPU their gradients are sparse, so that the others cost nothing.
    """

    def __init__(self, num_entities: int, decoder: Decoder, device: torch.device) -> None:
        super().__init__()
        self.rows, self.decoder = nn.Embedding(num_entities, decoder.dim, sparse=device.type == "cpu"), decoder
        if decoder.compares == "dot":
            nn.init.normal_(self.rows.weight, std=0.01)
            nn.init.normal_(decoder.get_parameter("relation"), std=0.1)
        else:
            nn.init.xavier_uniform_(self.rows.weight)

    def forward(
        self, head: Tensor, kind: Tensor, tail: Tensor, others: Tensor
    ) -> tuple[dict[End, tuple[Tensor, Tensor]], Tensor]:
        """By the end that is wanted: scores [links], and [links, others] with each of `others` as this end instead.

        And the sum of |row|^3 over the rows of a link, its mean over links: a penalty (N3, Lacroix et al. 2018).
        """
        sizes = [head.numel(), tail.numel(), others.numel()]
        head_rows, tail_rows, other_rows = self.rows(torch.cat([head, tail, others])).split(sizes)
        place = torch.full((self.rows.num_embeddings,), -1, device=others.device)
        place[others] = torch.arange(others.numel(), device=others.device)
        positive = self.decoder(head_rows, tail_rows, kind)  # the same from either end
        scores: dict[End, tuple[Tensor, Tensor]] = {}
        for wanted in ENDS:
            known_rows, true = (head_rows, tail) if wanted == "tail" else (tail_rows, head)
            negative = self.decoder.score_all(known_rows, other_rows, kind, wanted)
            (is_true,) = (place[true] >= 0).nonzero(as_tuple=True)
            negative[is_true, place[true[is_true]]] = -torch.inf  # the true end is no negative
            scores[wanted] = positive, negative
        relation_rows = F.embedding(kind, self.decoder.get_parameter("relation"))
        cubes = sum(rows.abs().pow(3).sum() for rows in (head_rows, tail_rows, relation_rows))
        return scores, cubes / max(1, head.numel())


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", nargs="?", help="an .npz file; left out, a small graph is generated")
    parser.add_argument("--model", choices=MODELS, default="complex")
    parser.add_argument("--dim", type=int, default=128, help="numbers of an entity's row")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=2048, help="links per step, of all trainers together")
    parser.add_argument("--negatives", type=int, default=500, help="entities that a link is compared with; 0: all")
    parser.add_argument("--margin", type=float, default=9.0, help="of models that score by distances")
    parser.add_argument("--penalty", type=float, default=0.05, help="times |row|^3, of models that score by products")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=0, help="validate after so many epochs; 0: at the end alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default this rank's GPU, the CPU where there is none")
    args = parser.parse_args(argv)
    with gnnsys.init(device=args.device) as session:
        return train(session, args)


def train(session: gnnsys.Session, args: argparse.Namespace) -> float:
    torch.manual_seed(args.seed)  # the same first rows on every rank
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns of sparse gradients where nobody chose
    links = generated() if args.links is None else read_links(args.links)
    num_kinds, device = 1 + int(links.kinds.max()), session.device
    penalty = 0.0 if args.model in DISTANCES else args.penalty
    model = KnowledgeModel(links.num_entities, MODELS[args.model](args.dim, num_kinds), device).to(device)
    trained: nn.Module = DistributedDataParallel(model) if session.world_size > 1 else model
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    train_links = [each.to(device) for each in links.of(0)]
    known = KnownLinks(links.heads, links.tails, links.kinds)
    draws = torch.Generator().manual_seed(args.seed)  # every rank draws the same, and takes its share
    for epoch in range(1, args.epochs + 1):
        model.train()
        for share in shares(train_links[0].numel(), args.batch_size, session, draws):
            head, kind, tail = (each[share.to(device)] for each in train_links)
            others = torch.arange(links.num_entities)
            if args.negatives:
                others = torch.randperm(links.num_entities, generator=draws)[: args.negatives]
            optimizer.zero_grad()
            scores, cubes = trained(head, kind, tail, others.to(device))
            loss = torch.stack([loss_of(*scores[wanted], args) for wanted in ENDS]).sum()
            (loss + penalty * cubes).backward()
            optimizer.step()
        if epoch == args.epochs or (args.every and epoch % args.every == 0):
            report(session, f"epoch {epoch:3d}  loss {loss.item():.3f}  valid", rank(model, links, 1, known, session))
    found = rank(model, links, 2, known, session)
    report(session, "test", found)
    return found["mrr"]


def shares(num_links: int, batch_size: int, session: gnnsys.Session, draws: torch.Generator) -> list[Tensor]:
    """This trainer's share of each batch of an epoch. The last links of an odd epoch wait for another one."""
    order, size = torch.randperm(num_links, generator=draws), min(batch_size, num_links)
    batches = order[: num_links // size * size].split(size)
    return [batch[session.rank :: session.world_size] for batch in batches]


def loss_of(positive: Tensor, negative: Tensor, args: argparse.Namespace) -> Tensor:
    if args.model in DISTANCES:
        return self_adversarial_link_loss(positive, negative, margin=args.margin)
    return softmax_link_loss(positive, negative)


def rank(model: KnowledgeModel, links: Links, split: int, known: KnownLinks, session: gnnsys.Session) -> dict:
    """Filtered ranks of both ends; each trainer ranks its share of the links."""
    model.eval()
    head, kind, tail = (each[session.rank :: session.world_size] for each in links.of(split))
    ranking = Ranking()
    for wanted in ENDS:
        rows = model.rows.weight.detach()
        ranking.update(rank_links(model.decoder, rows, head, tail, kind, wanted=wanted, known=known))
    return ranking.compute()


def report(session: gnnsys.Session, what: str, found: dict[str, float]) -> None:
    if session.rank == 0:
        print(what, "  ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)


def read_links(path: str) -> Links:
    with np.load(path, allow_pickle=False) as file:
        head, tail = torch.from_numpy(file["edge_index"]).long()
        kinds, split = (torch.from_numpy(file[name]).long() for name in ("edge_type", "edge_split"))
    return Links(head, kinds, tail, split)


def generated(num_groups: int = 20, size: int = 10, num_kinds: int = 4, seed: int = 0) -> Links:
    """Entities in groups: a relation leads from a group to one other, and half of all such pairs are links."""
    random = np.random.default_rng(seed)
    lead_to = np.stack([random.permutation(num_groups) for _ in range(num_kinds)])
    kind, head, place = np.indices((num_kinds, num_groups * size, size)).reshape(3, -1)
    tail = lead_to[kind, head // size] * size + place
    chosen = random.random(kind.size) < 0.5
    split = random.choice(3, kind.size, p=[0.8, 0.1, 0.1])
    return Links(*(torch.from_numpy(each[chosen]).long() for each in (head, kind, tail, split)))


if __name__ == "__main__":
    main()
