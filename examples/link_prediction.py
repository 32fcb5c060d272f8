"""Link prediction: GraphSAGE embeds both ends of a link, their dot product says how likely it is.

A tenth of the edges is held out. A batch's own links never take part in its message passing (the loader excludes them
inside the sampler), so that what is measured is prediction and not memory.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import gnnsys
from gnnsys.graph import Graph, sbm
from gnnsys.nn import GraphSAGE


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    graph, train_links, test_links = split_links(sbm(args.nodes, num_classes=5, homophily=0.9, seed=args.seed))
    loader = gnnsys.LinkNeighborLoader(
        graph,
        [10, 10],
        edge_label_index=train_links,
        neg_sampling="binary",
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
    )
    x = graph.node_data["node"]["x"]
    model = GraphSAGE(x.shape[1], 64, num_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1, args.epochs + 1):
        for batch in loader:
            score = link_scores(model(batch.x, batch.edge_index), batch.edge_label_index)
            loss = F.binary_cross_entropy_with_logits(score, batch.edge_label.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.3f}  held-out AUC {held_out_auc(model, graph, test_links):.3f}")
    return held_out_auc(model, graph, test_links)


def split_links(graph: Graph, test_share: float = 0.1) -> tuple[Graph, Tensor, Tensor]:
    """The graph without its held-out links (both directions), the links to train on and the held-out ones.

    sbm lists an edge's two directions as edge i and edge i + num_edges / 2, so each pair is kept or held out together.
    """
    edges = graph.edge_index()
    half = edges[:, : edges.shape[1] // 2]
    is_test = torch.rand(half.shape[1]) < test_share
    train, test = half[:, ~is_test], half[:, is_test]
    both = torch.cat([train, train.flip(0)], 1)
    return Graph.from_edge_index(both, graph.num_nodes(), graph.node_data["node"]), train, test


def link_scores(embedded: Tensor, links: Tensor) -> Tensor:
    return (embedded[links[0].long()] * embedded[links[1].long()]).sum(-1)


@torch.no_grad()
def held_out_auc(model: torch.nn.Module, graph: Graph, links: Tensor) -> float:
    """How often a held-out link scores above a random pair (ties count half)."""
    embedded = model(graph.node_data["node"]["x"], graph.csc())
    positive = link_scores(embedded, links)
    negative = link_scores(embedded, torch.randint(graph.num_nodes(), links.shape))
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive) + torch.searchsorted(ordered, positive, right=True)
    return float(below.double().mean() / (2 * negative.numel()))


if __name__ == "__main__":
    main()
