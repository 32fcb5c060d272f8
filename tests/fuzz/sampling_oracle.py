"""What holds of every batch of every loader, told in plain tensor code: edges are the graph's, rows are the nodes' own.

Nothing here knows how sampling is done: a batch is compared with the graph it says it is of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, Graph
from gnnsys.loader import Batch


def check_batch(graph: Graph, batch: Batch, options: dict[str, Any], fanouts: dict[EdgeType, list[int]]) -> None:
    """AssertionError, which says what, for a batch that is none of this graph under these options."""
    for t, store in batch.nodes.items():
        check_rows(store, "n_id", graph.node_data[t], f"{t}")
    subgraph_type = options.get("subgraph_type", "directional")
    for t, store in batch.edges.items():
        if "e_id" in store:
            check_rows(store, "e_id", graph.edge_data[t], f"{t}")
        if "edge_index" in store:
            ends = ends_of(batch, t, store["edge_index"])
            if "e_id" in store and subgraph_type != "bidirectional":
                assert torch.equal(ends, graph.edge_index(t)[:, store["e_id"]]), f"{t}: edge_index is not that of e_id"
            else:
                check_members(ends, graph.edge_index(t), t)
    if subgraph_type == "directional" and not batch.blocks:
        for t in batch.edges:
            check_fanout(graph, batch, t, fanouts[t], options)
            check_drawn(graph, batch, t, options)
    for block in batch.blocks:
        check_block(graph, batch, block)


def check_rows(store: Any, ids: str, arrays: Any, where: str) -> None:
    for name, rows in arrays.items():
        assert torch.equal(store[name], rows[store[ids]]), f"{where}: {name} is not that of {ids}"


def ends_of(batch: Batch, t: EdgeType, edge_index: Tensor) -> Tensor:
    return torch.stack([batch.nodes[t[0]]["n_id"][edge_index[0]], batch.nodes[t[2]]["n_id"][edge_index[1]]])


def check_members(ends: Tensor, edges: Tensor, t: EdgeType) -> None:
    """Of edges and their reverses: each is one of the graph, in one direction or the other."""
    known = {(int(a), int(b)) for a, b in edges.t().tolist()}
    for a, b in ends.t().tolist():
        assert (a, b) in known or (b, a) in known, f"{t}: {a} -> {b} is no edge"


def check_fanout(graph: Graph, batch: Batch, t: EdgeType, fanouts: list[int], options: dict[str, Any]) -> None:
    """How many in-edges each node has, hop by hop: at most the fanout, all of it where nothing else decides."""
    sizes, store = batch.nodes[t[2]]["num_sampled_nodes"], batch.edges[t]
    num_nodes = sum(sizes)
    degrees = torch.bincount(graph.edge_index(t)[1], minlength=graph.num_nodes(t[2]))
    taken = torch.bincount(store["edge_index"][1], minlength=num_nodes)
    ids = batch.nodes[t[2]]["n_id"]
    assert ids.numel() == num_nodes and store["edge_index"].shape[1] == sum(store["num_sampled_edges"])
    is_free = not ({"weight_attr", "time_attr"} & {k for k, v in options.items() if v is not None})
    is_free = is_free and not options.get("links") and ids.unique().numel() == ids.numel()
    begin = 0
    for hop, size in enumerate(sizes):
        nodes = slice(begin, begin + size)
        begin += size
        fanout = fanouts[hop] if hop < len(fanouts) else 0
        allowed = degrees[ids[nodes]]
        if options.get("replace") and fanout >= 0:
            allowed = torch.where(allowed > 0, fanout, 0)
        elif fanout >= 0:
            allowed = allowed.clamp(max=fanout)
        assert bool((taken[nodes] <= allowed).all()), f"{t}: more than the fanout {fanout} at hop {hop}"
        if is_free:
            assert torch.equal(taken[nodes], allowed), f"{t}: not all of what the fanout {fanout} allows at hop {hop}"
    if not options.get("replace"):
        pairs = torch.stack([store["edge_index"][1], store["e_id"]])
        assert torch.unique(pairs, dim=1).shape[1] == pairs.shape[1], f"{t}: an edge was drawn twice for one node"


def check_drawn(graph: Graph, batch: Batch, t: EdgeType, options: dict[str, Any]) -> None:
    """Weights, times and trees of the edges that were drawn."""
    store = batch.edges[t]
    row, col = store["edge_index"]
    weight = graph.edge_data[t].get(options.get("weight_attr") or "")
    if weight is not None:
        assert bool((weight[store["e_id"]] > 0).all()), f"{t}: an edge without weight was drawn"
    if "batch" not in batch.nodes[t[0]]:
        return
    trees = batch.nodes[t[0]]["batch"][row], batch.nodes[t[2]]["batch"][col]
    assert torch.equal(*trees), f"{t}: an edge joins two trees"
    time, seed_time = options.get("time_attr"), options.get("seed_time")
    if time is None or seed_time is None:
        return
    on_nodes = any(time in arrays for arrays in graph.node_data.values())
    data = graph.node_data[t[0]] if on_nodes else graph.edge_data[t]
    if time in data:
        drawn = data[time][batch.nodes[t[0]]["n_id"][row] if on_nodes else store["e_id"]]
        assert bool((drawn <= seed_time[trees[0]]).all()), f"{t}: something later than its seed was drawn"


def check_block(graph: Graph, batch: Batch, block: Any) -> None:
    for t, csc in block.csc.items():
        assert csc.num_src == block.num_src[t[0]] and csc.num_dst == block.num_dst[t[2]]
        col = torch.repeat_interleave(torch.arange(csc.num_dst), csc.indptr.diff())
        ends = ends_of(batch, t, torch.stack([csc.indices.long(), col]))
        edges = graph.edge_index(t)[:, csc.edge_ids.long()]
        assert torch.equal(ends, edges), f"{t}: a block's edge is not that of its id"


def check_links(graph: Graph, batch: Batch, t: EdgeType, links: Tensor, options: dict[str, Any]) -> None:
    """The batch's own links are those that were given, drawn ones are nodes with weight, and none is passed over."""
    store, src, dst = batch.edges[t], batch.nodes[t[0]], batch.nodes[t[2]]
    own = links[:, store["input_id"]]
    negatives = options.get("neg_sampling")
    if negatives is not None and negatives["mode"] == "triplet":
        assert torch.equal(src["n_id"][src["src_index"]], own[0]) and torch.equal(
            dst["n_id"][dst["dst_pos_index"]], own[1]
        )
        drawn = [(t[2], "dst_weight", dst["n_id"][dst["dst_neg_index"].reshape(-1)])]
    else:
        ends = ends_of(batch, t, store["edge_label_index"])
        assert torch.equal(ends[:, : own.shape[1]], own), f"{t}: these are not the links that were given"
        rest = ends[:, own.shape[1] :]
        drawn = [(t[0], "src_weight", rest[0]), (t[2], "dst_weight", rest[1])]
    for node_type, name, nodes in drawn:
        if negatives is not None and negatives.get(name) is not None:
            assert bool((graph.node_data[node_type]["popularity"][nodes] > 0).all()), f"{name}: drawn without weight"
    if options.get("exclude_supervision", True) and "edge_index" in store and not batch.blocks:
        passed = set(map(tuple, ends_of(batch, t, store["edge_index"]).t().tolist()))
        assert not passed & set(map(tuple, own.t().tolist())), f"{t}: a batch's own link is among its edges"
