"""What inspection counts, against a count over the source in plain Python; the expected batch, against sampling."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from xml.etree import ElementTree

import pytest
import torch

from gnnsys.graph import NODE, Graph, rmat, sbm
from gnnsys.partition import (
    Assignment,
    assign_parts,
    expected_remote,
    inspect_parts,
    open_parts,
    write_parts,
    write_plot,
)
from gnnsys.partition.plot import short, svg
from gnnsys.sampling import NeighborSampler, SampleKey
from tests.partition.part_graphs import (
    CASES,
    heterogeneous,
    homogeneous,
    random_assignment,
    read_manifest,
    write_manifest,
    written,
)
from tests.support.grid import grid

SVG = "{http://www.w3.org/2000/svg}"


class Count:
    """A parted graph as lists: `edges` are (source, destination) pairs of (type, original id)."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.assignment = graph, assignment
        self.subpart = {(t, v): s for t, of in assignment.subpart.items() for v, s in enumerate(of.tolist())}
        self.part = {node: s // assignment.trainers_per_part for node, s in self.subpart.items()}
        self.edges = defaultdict(list)
        for edge_type in graph.edge_types:
            src, _, dst = edge_type
            csc = graph.csc(edge_type)
            for u, v in zip(csc.indices.tolist(), csc.dst().tolist(), strict=True):
                self.edges[edge_type].append(((src, u), (dst, v)))
        self.all_edges = [edge for edges in self.edges.values() for edge in edges]
        self.remote_edges = [(u, v) for u, v in self.all_edges if self.part[u] != self.part[v]]
        self.sends = {(u, self.part[v]) for u, v in self.remote_edges}

    def halo(self, part: int, hops: int) -> set:
        core = {node for node, p in self.part.items() if p == part}
        known = set(core)
        for _ in range(hops):
            known |= {u for u, v in self.all_edges if v in known}
        return known - core

    def weights(self, name: str) -> dict:
        """What every node weighs in a constraint."""
        kind, _, which = name.partition(":")
        if kind in ("nodes", "ntype"):
            return {node: int(which in ("", node[0])) for node in self.subpart}
        if kind in ("edges", "etype"):
            weight = dict.fromkeys(self.subpart, 0)
            for edge_type, edges in self.edges.items():
                for _, v in edges if which in ("", "|".join(edge_type)) else []:
                    weight[v] += 1
            return weight
        masks = {t: rows.get(f"{kind}_mask") for t, rows in self.graph.node_data.items()}
        return {(t, v): 0 if masks[t] is None else int(masks[t][v]) for t, v in self.subpart}


@grid(chosen=written(2))
def test_every_number_is_what_a_count_over_the_source_says(chosen, tmp_path):
    case, (num_parts, trainers, hops) = chosen
    graph = CASES[case]()
    assignment = random_assignment(graph, num_parts, trainers, seed=hops)
    has_split = any("train_mask" in rows for rows in graph.node_data.values())
    names = ["nodes", "edges", "ntype", "etype", *(["train"] if has_split else [])]
    write_parts(graph, assignment, tmp_path / "parts", halo_hops=hops, info={"balance": names, "imbalance": 0.05})
    found, count = inspect_parts(tmp_path / "parts"), Count(graph, assignment)
    for p, part in enumerate(found.parts):
        for i, subpart in enumerate(part.subparts):
            s = p * trainers + i
            assert subpart.num_nodes == sum(x == s for x in count.subpart.values())
            assert subpart.num_edges == sum(count.subpart[v] == s for _, v in count.all_edges)
            assert subpart.num_cut == sum(count.subpart[v] == s for _, v in count.remote_edges)
            assert subpart.num_sent == sum(count.subpart[u] == s for u, _ in count.sends)
        assert part.num_halo == len(count.halo(p, hops)) and part.num_received == len(count.halo(p, 1))
        files = list((tmp_path / "parts" / f"part-{p:04d}").iterdir())
        assert part.structure_bytes + part.feature_bytes == sum(file.stat().st_size for file in files)
        for q in range(num_parts):
            assert found.traffic[p][q] == sum(count.part[u] == p and to == q for u, to in count.sends)
    assert found.cut_fraction == len(count.remote_edges) / max(len(count.all_edges), 1)
    copies = sum(len(count.halo(p, hops)) for p in range(num_parts))
    assert found.replication == ((len(count.part) + copies) / len(count.part) if count.part else 1.0)
    check_loads(found, count)
    for of in found.types:
        assert of.num_cut == sum(v[0] == of.name for _, v in count.remote_edges)
        assert of.num_sent == sum(u[0] == of.name for u, _ in count.sends)
    assert found.notes == () and str(found) == found.table()
    ElementTree.fromstring(svg(found))


def check_loads(found, count: Count) -> None:
    expected_names = ["nodes", "edges"] + [f"ntype:{t}" for t in count.graph.node_types]
    expected_names += [f"etype:{'|'.join(t)}" for t in count.graph.edge_types]
    assert {load.name for load in found.loads} - {"train"} == set(expected_names)
    for load in found.loads:
        weights = count.weights(load.name)
        loads = [0] * count.assignment.num_subparts
        for node, weight in weights.items():
            loads[count.subpart[node]] += weight
        assert list(load.subparts) == loads and load.heaviest_node == max(weights.values(), default=0)
        assert load.allowed == pytest.approx(1.05)
        assert load.balance.ratio == pytest.approx(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0)


def test_constraints_are_counted_and_not_believed(tmp_path):
    graph = homogeneous(40, 200, 3)
    subpart = torch.tensor([0] * 30 + [1] * 10, dtype=torch.int32)
    claim = {"name": "nodes", "allowed": 1.05, "total": 40, "heaviest": 20, "num_parts": 2, "heaviest_node": 1}
    info = {"balance": [claim | {"ratio": 1.0}, {"name": "colour", "allowed": 1.05}]}
    write_parts(graph, Assignment(2, 1, {NODE: subpart}), tmp_path / "parts", info=info)
    found = inspect_parts(tmp_path / "parts")
    assert found.loads[0].subparts == (30, 10) and found.loads[0].balance.ratio == 1.5
    lines = found.table().splitlines()
    assert next(line for line in lines if line.startswith("0 ")).endswith("1.500!")
    assert next(line for line in lines if line.startswith("1 ")).endswith("0.500")
    assert next(line for line in lines if line.startswith("balance nodes")).endswith(
        "1.500 of 1.05 allowed ! how the parts were made is not recorded"
    )
    assert found.notes == ("the manifest records a balance of 'colour', which these parts have nothing to count by",)


@pytest.mark.parametrize("info", [{}, {"balance": 7}, {"balance": "train"}])
def test_parts_whose_writer_recorded_nothing_are_counted_by_what_they_have(info, tmp_path):
    write_parts(homogeneous(20, 60), random_assignment(homogeneous(20, 60), 2, 1), tmp_path / "a", info=info)
    assert [load.name for load in inspect_parts(tmp_path / "a").loads] == ["nodes", "edges", "train"]
    typed = heterogeneous()
    write_parts(typed, random_assignment(typed, 2, 1), tmp_path / "b", info=info)
    found = inspect_parts(tmp_path / "b")
    assert [load.name for load in found.loads] == ["nodes", "edges", "ntype:paper", "ntype:author", "ntype:venue"]
    assert all(load.allowed is None and load.balance.met for load in found.loads)


def test_the_table_has_a_row_per_part_and_subpart_and_one_per_node_type(tmp_path):
    graph = heterogeneous(num_papers=60, num_edges=300)
    assigned = assign_parts(graph, 2, 2)
    write_parts(graph, assigned.assignment, tmp_path / "parts", info={"balance": ["edges", "ntype"], "imbalance": 0.1})
    found = inspect_parts(tmp_path / "parts")
    head, main, totals, types = found.table().split("\n\n")
    assert "2 parts, 2 trainers each; 69 nodes, 600 edges; halo of 1 hop" in head
    rows = [line.split() for line in main.splitlines()]
    assert [row[0] for row in rows] == ["part", "0", "0.0", "0.1", "1", "1.0", "1.1", "total"]
    assert rows[0][-2:] == ["ntype:author/avg", "ntype:venue/avg"]
    assert [int(rows[i][2]) for i in (1, 4)] == [part.num_edges for part in found.parts]
    assert int(rows[2][1]) == found.parts[0].subparts[0].num_nodes and rows[-1][1:3] == ["69", "600"]
    names = [line.split("  ")[0] for line in totals.splitlines()]
    assert names[:4] == ["cut", "replication", "traffic", "balance nodes"] and names[-2:] == ["structure", "remote"]
    assert [line.split()[0] for line in types.splitlines()[1:]] == ["paper", "author", "venue"]


def test_all_numbers_are_plain_json_values(tmp_path):
    graph = homogeneous(30, 120)
    write_parts(graph, random_assignment(graph, 3, 2), tmp_path / "parts")
    found = inspect_parts(tmp_path / "parts")
    values = json.loads(json.dumps(found.to_json()))
    assert values["traffic"] == [list(row) for row in found.traffic]
    assert sum(part["num_cut"] for part in values["parts"]) == pytest.approx(values["cut_fraction"] * 120)
    assert values["loads"][0] | {"subparts": None} == {
        "name": "nodes", "subparts": None, "trainers_per_part": 2, "heaviest_node": 1, "allowed": None, "method": "",
        "ratio": found.loads[0].balance.ratio, "met": True, "reason": None,
    }  # fmt: skip
    assert values["remote"]["fraction"] == found.remote.fraction


def test_progress_covers_the_counting_and_the_expected_batches(tmp_path):
    graph = homogeneous(50, 300)
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts")
    calls = []
    inspect_parts(tmp_path / "parts", progress=lambda done, total, what: calls.append((done, total, what)))
    assert (300, 300, "part 2") in calls
    assert calls[-1] == (2100, 2100, "expected batches of part 2")


# -- the expected batch ------------------------------------------------------------------------------------------------


@grid(case=["int32", "multi-edges", "isolated nodes", "components", "typed", "random 7"], hops=[1, 2, 3])
def test_a_batch_of_all_seeds_with_all_neighbours_is_exactly_what_they_reach(case, hops, tmp_path):
    graph = CASES[case]()
    assignment = random_assignment(graph, 3, 1)
    write_parts(graph, assignment, tmp_path / "parts", halo_hops=2)
    remote, count = (
        expected_remote(open_parts(tmp_path / "parts"), [-1] * hops, batch_size=1000),
        Count(graph, assignment),
    )
    masks = {t: rows.get("train_mask") for t, rows in graph.node_data.items()}
    has_split = any(mask is not None for mask in masks.values())
    assert remote.seeds == ("train nodes" if has_split else "nodes")
    for p, batch in enumerate(remote.parts):
        own = {node for node, q in count.part.items() if q == p}
        reached = {(t, v) for t, v in own if not has_split or (masks[t] is not None and bool(masks[t][v]))}
        assert batch.num_seeds == len(reached)
        for _ in range(hops):
            reached |= {u for u, v in count.all_edges if v in reached}
        assert batch.num_rows == pytest.approx(len(reached))
        assert batch.num_remote == pytest.approx(len(reached - own), abs=1e-6)


@pytest.mark.parametrize(
    ("make", "fanouts", "batch_size"),
    [
        (lambda: rmat(600, 6000), [4], 16),
        (lambda: rmat(600, 6000), [15, 10, 5], 16),
        (lambda: sbm(2000), [5, 3], 32),
        pytest.param(lambda: sbm(2000), [15, 10, 5], 64, marks=pytest.mark.long),
    ],
)
def test_the_expectation_is_what_the_sampler_does_on_average(make, fanouts, batch_size, tmp_path):
    graph, num_batches = make(), 200
    assignment = assign_parts(graph, 3).assignment
    write_parts(graph, assignment, tmp_path / "parts")
    remote = expected_remote(open_parts(tmp_path / "parts"), fanouts, batch_size=batch_size)
    sampler, part = NeighborSampler(graph, fanouts), assignment.part(NODE)
    mask = graph.node_data[NODE].get("train_mask", torch.ones(graph.num_nodes(), dtype=torch.bool))
    generator = torch.Generator().manual_seed(0)
    for p, batch in enumerate(remote.parts):
        seeds, sampled = (mask & (part == p)).nonzero().view(-1), []
        for i in range(num_batches):
            chosen = seeds[torch.randperm(seeds.numel(), generator=generator)[:batch_size]]
            sampled.append(sampler.sample({NODE: chosen}, key=SampleKey(batch=i)).node[NODE].unique())
        rows = sum(ids.numel() for ids in sampled) / num_batches
        fraction = sum(int((part[ids] != p).sum()) for ids in sampled) / num_batches / rows
        assert batch.num_rows == pytest.approx(rows, rel=0.04)
        assert batch.fraction == pytest.approx(fraction, abs=0.02)


def test_hops_beyond_the_first_are_left_out_of_large_graphs_unless_they_are_named(tmp_path):
    graph = homogeneous(60, 400)
    write_parts(graph, random_assignment(graph, 3, 1), tmp_path / "parts")
    parts = open_parts(tmp_path / "parts")
    first = expected_remote(parts, work_limit=2 * 3 * 400 - 1)
    assert (first.fanouts, first.num_skipped) == ((15,), 2)
    assert first.parts == expected_remote(parts, [15]).parts
    whole = expected_remote(parts, work_limit=2 * 3 * 400)
    assert (whole.fanouts, whole.num_skipped) == ((15, 10, 5), 0)
    assert whole.parts == expected_remote(parts, [15, 10, 5], work_limit=0).parts != first.parts


def test_nothing_is_remote_in_a_single_part_and_a_part_without_seeds_expects_nothing(tmp_path):
    graph = homogeneous(30, 200)
    write_parts(graph, random_assignment(graph, 1, 1), tmp_path / "one")
    assert inspect_parts(tmp_path / "one").remote.fraction == 0
    graph.node_data[NODE]["train_mask"] = torch.arange(30) < 10
    halves = Assignment(2, 1, {NODE: (torch.arange(30) >= 10).int()})
    write_parts(graph, halves, tmp_path / "two")
    found = inspect_parts(tmp_path / "two")
    assert [batch.num_seeds for batch in found.remote.parts] == [10, 0]
    assert found.remote.parts[1].fraction is None and found.remote.fraction == found.remote.parts[0].fraction > 0
    row = next(line.split() for line in found.table().splitlines() if line.startswith("1 "))
    assert "-" in row


@pytest.mark.parametrize("fanouts", [[], [-2], [3, 1.5]])
def test_fanouts_that_mean_nothing_are_refused(fanouts, tmp_path):
    write_parts(homogeneous(5, 9), random_assignment(homogeneous(5, 9), 2, 1), tmp_path / "parts")
    with pytest.raises(ValueError, match="fanouts must be a whole number per hop"):
        inspect_parts(tmp_path / "parts", fanouts=fanouts)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        inspect_parts(tmp_path / "parts", batch_size=0)


# -- the plot ----------------------------------------------------------------------------------------------------------


def test_the_plot_has_a_cell_per_pair_of_parts_with_its_number_and_a_bar_per_subpart(tmp_path):
    graph = heterogeneous(num_papers=90, num_edges=500)
    write_parts(
        graph, random_assignment(graph, 3, 2), tmp_path / "parts", info={"balance": ["edges"], "imbalance": 0.0}
    )
    found = inspect_parts(tmp_path / "parts")
    write_plot(found, tmp_path / "plot.svg")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    rects = defaultdict(list)
    for rect in root.iter(f"{SVG}rect"):
        rects[rect.get("class")].append(rect)
    titles = [rect.find(f"{SVG}title").text for rect in rects["cell"]]
    expected = [f"part {p} to part {q}: {found.traffic[p][q]:,} rows" for p in range(3) for q in range(3)]
    assert titles == expected
    shown = [text.text for text in root.iter(f"{SVG}text")]
    for p in range(3):
        assert all(short(found.traffic[p][q]) in shown for q in range(3) if p != q)
    assert len(rects["bar"]) + len(rects["over"]) == 6 * len(found.loads)
    assert len(rects["over"]) == sum(share > load.allowed for load in found.loads for share in load.subpart_shares) > 0
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for rect in [*rects["cell"], *rects["bar"], *rects["over"]]:
        assert float(rect.get("x")) >= 0 and float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) >= 0 and float(rect.get("y")) + float(rect.get("height")) <= height


def test_a_plot_of_many_parts_leaves_the_numbers_to_the_tips(tmp_path):
    graph = homogeneous(20, 80)
    write_parts(graph, random_assignment(graph, 40, 1), tmp_path / "parts")
    root = ElementTree.fromstring(svg(inspect_parts(tmp_path / "parts")))
    assert sum(rect.get("class") == "cell" for rect in root.iter(f"{SVG}rect")) == 1600
    assert len(list(root.iter(f"{SVG}text"))) < 200


def test_names_that_xml_would_stumble_over_are_drawn_as_they_are(tmp_path):
    graph = Graph.from_edge_indices({("a<b", "&", "a<b"): torch.tensor([[0, 1], [1, 0]])}, {"a<b": 2})
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts", info={"balance": ["ntype"]})
    texts = [text.text for text in ElementTree.fromstring(svg(inspect_parts(tmp_path / "parts"))).iter(f"{SVG}text")]
    assert any(text.startswith("ntype:a<b: heaviest") for text in texts)


def test_numbers_in_cells_are_short():
    counts = [0, 7, 999, 1000, 12_345, 99_949, 99_950, 999_499, 999_500, 4_000_000, 3 * 10**14, 5 * 10**15]
    shown = ["0", "7", "999", "1.0k", "12.3k", "99.9k", "100k", "999k", "1.0M", "4.0M", "300T", "5000T"]
    assert [short(count) for count in counts] == shown


def test_a_plot_that_cannot_be_drawn_is_refused_with_what_to_write_instead(tmp_path):
    graph = homogeneous(5, 9)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts")
    found = inspect_parts(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"must end in \.svg or \.png, got"):
        write_plot(found, tmp_path / "plot.pdf")
    with pytest.raises(ValueError, match="does not exist"):
        write_plot(found, tmp_path / "nowhere" / "plot.svg")
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ValueError, match=r"needs matplotlib, which is not installed: write .*plot\.svg instead"):
            write_plot(found, tmp_path / "plot.png")
    else:
        write_plot(found, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_part_that_does_not_open_is_named(tmp_path):
    graph = homogeneous(20, 80)
    write_parts(graph, random_assignment(graph, 2, 1), tmp_path / "parts")
    manifest = read_manifest(tmp_path / "parts")
    manifest["parts"][1]["nodes"][0]["num_core"] += 1
    write_manifest(tmp_path / "parts", manifest)
    with pytest.raises(ValueError, match=r"manifest\.json is malformed: part 1"):
        inspect_parts(tmp_path / "parts")
