"""From a batch of links to the seeds of a sample, and back to the links' local ids.

One place for both faces (ours and PyG's): positives, then negatives; unique seeds, or one tree per end where trees are
disjoint. All randomness comes from the generator that the caller passes.

On parts ends, names and supervision edges have to be looked up. What does not depend on each other is asked together:
a batch waits for other machines twice at most, and not at all where everything is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader.identity import checksum
from gnnsys.loader.links import Exclusion, Links, LinksAsked
from gnnsys.loader.negative_kinds import Choice, Drawn, NegativesWanted, NodeDrawer
from gnnsys.loader.negatives import NegativeSampling
from gnnsys.loader.weighted_negatives import UniformNegatives
from gnnsys.sampling import DistGraph, to_device
from gnnsys.store import ReadContext, as_source

NODE_TYPE_AT = {"src": 0, "dst": 2}  # where an edge type names an end's node type


@dataclass
class LinkSeeds:
    """What to sample from, and where the links' ends are among the seeds."""

    seeds: dict[NodeType, Tensor]
    seed_time: dict[NodeType, Tensor] | None
    tree: dict[NodeType, Tensor] | None  # one per seed, numbered across types; disjoint only
    link_of_tree: Tensor | None  # int64, the positive link that a tree belongs to
    values: dict[str, Tensor] = field(default_factory=dict)  # edge_label_index, edge_label, ... or src_index, ...
    exclude: dict[EdgeType, Tensor] | None = None  # the links and their reverses, as the sampler names edges

    def owners(self, tree: dict[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        """The positive link of each sampled node, from the tree it was sampled in (PyG's `batch`)."""
        assert self.link_of_tree is not None
        return {node_type: to_device(self.link_of_tree, of.device)[of] for node_type, of in tree.items()}

    def by_type(self, edge_type: EdgeType, input_id: Tensor) -> dict[NodeType | EdgeType, dict[str, Any]]:
        """The values by where they belong: labels to the edge type, triplets to its two node types."""
        out: dict[NodeType | EdgeType, dict[str, Any]] = {edge_type: {"input_id": input_id}}
        if "src_index" not in self.values:
            out[edge_type].update(self.values)
            return out
        src, dst = out.setdefault(edge_type[0], {}), out.setdefault(edge_type[2], {})
        src["src_index"] = self.values["src_index"]
        dst.update({name: self.values[name] for name in ("dst_pos_index", "dst_neg_index")})
        if "seed_time" in self.values:
            src["seed_time"] = dst["seed_time"] = self.values["seed_time"]
        if "edge_label_weight" in self.values:
            out[edge_type]["edge_label_weight"] = self.values["edge_label_weight"]
        return out


@dataclass(frozen=True)
class _Nodes:
    """Nodes as the graph names them, and by the user's own ids where these are needed."""

    ids: Tensor
    original: Tensor | None

    def take(self, at: Tensor) -> _Nodes:
        return _Nodes(self.ids[at], None if self.original is None else self.original[at])


class _Names:
    """Both names of nodes. In memory they are the same; on parts what is not known is looked up, in two halves.

    The user's ids are needed where seeds are made unique: they stand in the order of these.
    """

    def __init__(self, graph: DistGraph | None, needs_original: bool) -> None:
        self._graph, self._needs_original = graph, needs_original

    def begin(self, named: Mapping[str, tuple[NodeType, Drawn]]) -> Callable[[], dict[str, _Nodes]]:
        """Of nodes that are named by `original` or by `ids`."""
        if self._graph is None:
            return lambda: {key: _Nodes(_either(of), None) for key, (_, of) in named.items()}
        to_global = {key: (t, of.original) for key, (t, of) in named.items() if of.original is not None}
        to_original = {key: (t, of.ids) for key, (t, of) in named.items() if of.original is None and of.ids is not None}
        if not self._needs_original:
            asked = self._graph.begin_names(list(to_global.values()), [])
            return lambda: {
                **{key: _Nodes(ids, None) for key, ids in zip(to_global, asked()[0], strict=True)},
                **{key: _Nodes(ids, None) for key, (_, ids) in to_original.items()},
            }
        asked = self._graph.begin_names(list(to_global.values()), list(to_original.values()))

        def names() -> dict[str, _Nodes]:
            ids, original = asked()
            found = {key: _Nodes(i, o) for (key, (_, o)), i in zip(to_global.items(), ids, strict=True)}
            return found | {key: _Nodes(i, o) for (key, (_, i)), o in zip(to_original.items(), original, strict=True)}

        return names


def _either(drawn: Drawn) -> Tensor:
    nodes = drawn.original if drawn.ids is None else drawn.ids
    assert nodes is not None
    return nodes


class LinkNodes(NamedTuple):
    """The ends of a batch's links of one type, positives and then negatives."""

    links: Links
    src: _Nodes
    dst: _Nodes
    num_negatives: int
    exclude: dict[EdgeType, Tensor] | None  # the links and their reverses, as the sampler names edges


class LinkSeeder:
    """Draws negatives and makes seeds, for links of one edge type.

    On a graph in parts (`names`) unique seeds stand in the order of their original ids, so that a batch is the one a
    single process makes. `drawers` draw the nodes of one end each.
    """

    def __init__(
        self,
        edge_type: EdgeType,
        negatives: NegativeSampling | None,
        disjoint: bool,
        drawers: Mapping[str, NodeDrawer],
        names: DistGraph | None = None,
        candidates: Any = None,
    ) -> None:
        self.edge_type = edge_type
        self._negatives = negatives
        self._disjoint = disjoint
        self._drawers = drawers
        self._names = _Names(names, needs_original=not disjoint)
        self._candidates = candidates

    @cached_property
    def told_negatives(self) -> dict[str, Any] | None:
        """What negatives are drawn of, as a loader's state says it: weights by a checksum, whatever held them.

        It is of their values as float32, which a list, an array of doubles and a tensor have in common.
        """
        negatives = self._negatives
        if negatives is None:
            return None
        weights = {name: getattr(negatives, name) for name in ("src_weight", "dst_weight")}
        told = {name: None if w is None else f"{w.numel()} {checksum(w.float()):08x}" for name, w in weights.items()}
        if negatives.kind != UniformNegatives() or negatives.corrupt is not None:
            told |= {"kind": negatives.kind.told(), "corrupt": negatives.corrupt}
        return {"mode": negatives.mode, "amount": negatives.amount, **told}

    def __call__(
        self, given: Links | LinksAsked, stream: torch.Generator, exclusion: Exclusion | None = None
    ) -> LinkSeeds:
        """Seeds of a batch; with `exclusion` also what must be kept out of it."""
        asked = LinksAsked.known(given) if isinstance(given, Links) else given
        nodes = self.begin(asked, stream, exclusion)()()
        out, src_at, dst_at = self._place(nodes)
        out.values = self.values(nodes, src_at, dst_at)
        out.exclude = nodes.exclude
        return out

    # -- nodes of the links, negatives among them ----------------------------------------------------------------------

    def begin(
        self, asked: LinksAsked, stream: torch.Generator, exclusion: Exclusion | None
    ) -> Callable[[], Callable[[], LinkNodes]]:
        """Asks for what is needed first. The result waits for it and asks for the rest; its result has everything."""
        drawers = self._drawers
        num_links = asked.input_id.numel()
        count = 0 if self._negatives is None else self._negatives.count(num_links)
        wanted = NegativesWanted(count, num_links, stream, asked.time)
        drawn = {end: of.draw(wanted) for end, of in drawers.items() if not of.needs_links}
        first_names = self._begin_names(drawn)
        candidates = self._begin_candidates(asked)
        own = None if asked.ends.waits else self._begin_own(asked.ends.result(), exclusion)
        return partial(self._ask_more, asked, wanted, exclusion, drawn, first_names, candidates, own)

    def _ask_more(
        self,
        asked: LinksAsked,
        wanted: NegativesWanted,
        exclusion: Exclusion | None,
        drawn: dict[str, Drawn],
        first_names: Callable[[], dict[str, _Nodes]],
        candidates: Callable[[], Tensor] | None,
        own: _OwnNodes | None,
    ) -> Callable[[], LinkNodes]:
        links, named = asked.ends.result(), first_names()
        rows = None if candidates is None else candidates()
        own = self._begin_own(links, exclusion) if own is None else own
        ends, others = {"src": links.src, "dst": links.dst}, {"src": links.dst, "dst": links.src}
        late = {
            end: of.draw(replace(wanted, ends=ends[end], candidates=rows))
            for end, of in self._drawers.items()
            if of.needs_links
        }
        last_names = self._begin_names(late)
        choices = {
            end: of.then(named[end].ids, ends[end], others[end]) for end, of in drawn.items() if of.then is not None
        }
        return partial(self._collect, links, wanted, drawn | late, named, last_names, choices, own)

    def _collect(
        self,
        links: Links,
        wanted: NegativesWanted,
        drawn: dict[str, Drawn],
        named: dict[str, _Nodes],
        last_names: Callable[[], dict[str, _Nodes]],
        choices: dict[str, Choice],
        own: _OwnNodes,
    ) -> LinkNodes:
        named, found = named | last_names(), own.names()
        both = dict(found)
        for end in ("src", "dst"):
            if end in drawn:
                at = choices[end]() if end in choices else drawn[end].at
                of_links = drawn[end].link
                nodes = named[end] if of_links is None else found[end].take(of_links)
                both[end] = _joined(found[end], nodes if at is None else nodes.take(at))
            elif self._negatives is not None and not self._negatives.is_triplet:  # pairs have this end of their links
                both[end] = _joined(found[end], found[end].take(wanted.link()))
        exclude = None if own.excluded is None else own.excluded()
        return LinkNodes(links, both["src"], both["dst"], wanted.count, exclude)

    def _begin_own(self, links: Links, exclusion: Exclusion | None) -> _OwnNodes:
        excluded = None if exclusion is None else exclusion.begin(links)
        names = self._begin_names({"src": Drawn(ids=links.src), "dst": Drawn(ids=links.dst)})
        return _OwnNodes(names, excluded)

    def _begin_names(self, drawn: Mapping[str, Drawn]) -> Callable[[], dict[str, _Nodes]]:
        named = {end: (self.edge_type[NODE_TYPE_AT[end]], of) for end, of in drawn.items() if of.link is None}
        return self._names.begin(named) if named else dict

    def _begin_candidates(self, asked: LinksAsked) -> Callable[[], Tensor] | None:
        if self._candidates is None:
            return None
        at = asked.input_id if isinstance(self._candidates, Tensor) else asked.edge_id
        assert at is not None
        context = ReadContext()
        read = as_source(self._candidates).begin(at, None, context)
        context.send()
        return lambda: read.result()

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def values(self, nodes: LinkNodes, src_at: Tensor, dst_at: Tensor) -> dict[str, Tensor]:
        """What a batch says of its links, by their local ids."""
        links, num_negatives = nodes.links, nodes.num_negatives
        num_positives = links.src.numel()
        if self._negatives is not None and self._negatives.is_triplet:
            values = _triplets(src_at, dst_at, num_positives, int(self._negatives.amount))
            if links.time is not None:
                values["seed_time"] = links.time
            if links.weight is not None:
                values["edge_label_weight"] = links.weight
            return values
        values = {"edge_label_index": torch.stack([src_at, dst_at])}
        if self._negatives is not None:
            positive = torch.ones(num_positives, device="cpu") if links.label is None else links.label
            negative = positive.new_zeros((num_negatives, *positive.shape[1:]))
            values["edge_label"] = torch.cat([positive, negative])
        elif links.label is not None:
            values["edge_label"] = links.label
        if links.time is not None:
            values["edge_label_time"] = _for_each(links.time, src_at.numel())
        if links.weight is not None:
            values["edge_label_weight"] = torch.cat([links.weight, links.weight.new_ones(num_negatives)])
        return values

    def _place(self, nodes: LinkNodes) -> tuple[LinkSeeds, Tensor, Tensor]:
        """Seeds, and the local id of every source and destination. The i-th negative belongs to link i % positives."""
        (src_type, _, dst_type), time, num_positives = self.edge_type, nodes.links.time, nodes.links.src.numel()
        if not self._disjoint:
            seeds, (src_at, dst_at) = unique_seeds([(src_type, nodes.src), (dst_type, nodes.dst)])
            return LinkSeeds(seeds, None, None, None), src_at, dst_at
        src, dst = nodes.src.ids, nodes.dst.ids
        src_at, dst_at = torch.arange(src.numel(), device="cpu"), torch.arange(dst.numel(), device="cpu")
        trees = torch.arange(src.numel() + dst.numel(), device="cpu")
        link_of_tree = torch.cat([src_at, dst_at]) % max(1, num_positives)
        src_time = None if time is None else _for_each(time, src.numel())
        dst_time = None if time is None else _for_each(time, dst.numel())
        by_type = _join if src_type == dst_type else _apart
        seeds = by_type(self.edge_type, src, dst)
        tree = by_type(self.edge_type, trees[: src.numel()], trees[src.numel() :])
        times = None if src_time is None or dst_time is None else by_type(self.edge_type, src_time, dst_time)
        if src_type == dst_type:
            dst_at = dst_at + src.numel()
        return LinkSeeds(seeds, times, tree, link_of_tree), src_at, dst_at


class _OwnNodes(NamedTuple):
    """What is asked about the links themselves."""

    names: Callable[[], dict[str, _Nodes]]
    excluded: Callable[[], dict[EdgeType, Tensor]] | None


def _joined(positives: _Nodes, negatives: _Nodes) -> _Nodes:
    if positives.original is None or negatives.original is None:
        return _Nodes(torch.cat([positives.ids, negatives.ids]), None)
    original = torch.cat([positives.original, negatives.original])
    return _Nodes(torch.cat([positives.ids, negatives.ids]), original)


def unique_seeds(ends: list[tuple[NodeType, _Nodes]]) -> tuple[dict[NodeType, Tensor], list[Tensor]]:
    """The nodes of each type, each once and ascending by the user's ids, and where each end went."""
    seeds: dict[NodeType, Tensor] = {}
    places: list[Tensor] = [torch.empty(0, device="cpu")] * len(ends)
    for node_type in dict.fromkeys(t for t, _ in ends):
        numbers = [i for i, (t, _) in enumerate(ends) if t == node_type]
        ids = torch.cat([ends[i][1].ids for i in numbers])
        known = [ends[i][1].original for i in numbers]
        original = ids if known[0] is None else torch.cat([rows for rows in known if rows is not None])
        unique, at = torch.unique(original, return_inverse=True)
        seeds[node_type] = torch.empty_like(unique).scatter_(0, at, ids)
        for i, place in zip(numbers, at.split([ends[i][1].ids.numel() for i in numbers]), strict=True):
            places[i] = place
    return seeds, places


def _for_each(time: Tensor, count: int) -> Tensor:
    return time.repeat(-(-count // max(1, time.numel())))[:count]


def _join(edge_type: EdgeType, src: Tensor, dst: Tensor) -> dict[NodeType, Tensor]:
    return {edge_type[0]: torch.cat([src, dst])}


def _apart(edge_type: EdgeType, src: Tensor, dst: Tensor) -> dict[NodeType, Tensor]:
    return {edge_type[0]: src, edge_type[2]: dst}


def _triplets(src_at: Tensor, dst_at: Tensor, num_positives: int, amount: int) -> dict[str, Tensor]:
    negative = dst_at[num_positives:].view(amount, num_positives).t()
    return {
        "src_index": src_at,
        "dst_pos_index": dst_at[:num_positives],
        "dst_neg_index": negative.squeeze(1) if amount == 1 else negative.contiguous(),
    }
