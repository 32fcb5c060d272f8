"""Names in a checkpoint: whatever the order of `resume`'s arguments, or of an optimizer's list, states find theirs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

import gnnsys
from gnnsys.checkpoint import folder as folders
from gnnsys.checkpoint.states import sort_states
from gnnsys.graph import Graph
from gnnsys.partition import partition_graph
from gnnsys.store import Shard, Store

ROWS, DIM = 6, 2


class Model(nn.Module):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.inner = gnnsys.DistEmbedding(store, ROWS, DIM, "inner", init=0.0)
        self.other = gnnsys.DistEmbedding(store, ROWS, DIM, "other", init=0.0)
        self.last = nn.Linear(DIM, 1)


def life(folder, order, *, save=False, turned=False, names=("model", "encoder", "sparse")):
    """Makes a job, gives its states to `resume` in this order, and saves it or tells what it restored."""
    shard = Shard(0)
    store = Store(machine_of_part=[0], local=shard)
    model = Model(store)
    embeddings = [model.other, model.inner] if turned else [model.inner, model.other]
    states = {"model": model, "encoder": nn.Sequential(model.inner), "sparse": gnnsys.SparseAdam(embeddings)}
    states = {name: state for name, state in states.items() if name in names}
    if save:
        for number, embedding in enumerate((model.inner, model.other), 1):
            store.push(embedding.name, torch.arange(ROWS), torch.full((ROWS, DIM), float(number))).result()
    try:
        with gnnsys.resume(folder, asynchronous=False, **{names[i]: states[names[i]] for i in order}) as saver:
            if save:
                saver.save()
                return None
            assert saver.restored is not None
            return [float(store.tensor(name)[:].sum()) / (ROWS * DIM) for name in ("inner", "other")]
    finally:
        shard.close()


def rename_table(path, old, new):
    """Makes a checkpoint what it is when one of its tables has another name."""
    (path / "tables" / old).rename(path / "tables" / new)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    manifest["tables"] = {new if name == old else name: entry for name, entry in manifest["tables"].items()}
    manifest["files"] = {
        file.replace(f"tables/{old}/", f"tables/{new}/"): entry for file, entry in manifest["files"].items()
    }
    folders.describe(path, manifest)


def test_the_order_of_arguments_decides_nothing(tmp_path):
    orders = list(itertools.permutations(range(3)))
    for number, order in enumerate(orders):
        life(tmp_path / str(number), order, save=True)
        for other in orders:
            assert life(tmp_path / str(number), other) == [1.0, 2.0], (order, other)
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*/step-0000000000/manifest.json")]
    assert len(manifests) == len(orders)
    assert all(manifest["files"].keys() == manifests[0]["files"].keys() for manifest in manifests)


@pytest.mark.parametrize("names", [("sparse.0", "sparse.1"), ("encoder.0", "sparse.1"), ("model.inner", "model.other")])
def test_checkpoints_that_were_named_by_the_order_of_arguments_are_found_in_any(tmp_path, names):
    life(tmp_path, range(3), save=True)
    path = tmp_path / "step-0000000000"
    for old, new in zip(sorted(entry.name for entry in (path / "tables").iterdir()), names, strict=True):
        if old != new:
            rename_table(path, old, new)
    for order in itertools.permutations(range(3)):
        assert life(tmp_path, order) == [1.0, 2.0]


def test_an_optimizer_that_lists_its_embeddings_in_another_order_gets_each_ones_rows(tmp_path):
    life(tmp_path, [0], save=True, names=("sparse",))
    assert life(tmp_path, [0], names=("sparse",)) == [1.0, 2.0]
    assert life(tmp_path, [0], names=("sparse",), turned=True) == [1.0, 2.0]


def test_a_checkpoint_of_other_names_is_still_refused(tmp_path):
    life(tmp_path, [0], save=True, names=("sparse",))
    with pytest.raises(ValueError, match="it has no 'model'"):
        life(tmp_path, range(2), names=("model", "sparse"))
    rename_table(tmp_path / "step-0000000000", "sparse.1", "sparse.7")
    with pytest.raises(ValueError, match=r"it has no 'sparse.1'"):
        life(tmp_path, [0], names=("sparse",))


def test_tables_of_two_graphs_that_have_one_name_get_each_its_own_rows(tmp_path):
    for seed, name in enumerate("ab"):
        edges = torch.randint(0, ROWS, (2, 20), generator=torch.Generator().manual_seed(seed))
        partition_graph(Graph.from_edge_index(edges, ROWS), 2, tmp_path / name)

    def life(order: str, *, save: bool) -> list[float]:
        with gnnsys.init(process_group=False) as session:
            graphs = [gnnsys.open(tmp_path / name) for name in order]
            made = [gnnsys.DistEmbedding(graph, ROWS, DIM, "node/node/e", init=0.0) for graph in graphs]
            with gnnsys.resume(tmp_path / "saved", session=session, sparse=gnnsys.SparseAdam(made)) as saver:
                if save:
                    for number, embedding in enumerate(made, 1):
                        embedding.table[:] = torch.full((ROWS, DIM), float(number))
                    saver.save()
                assert save or saver.restored is not None
                return [float(embedding.table[:].mean()) for embedding in made]

    assert life("ab", save=True) == [1.0, 2.0]
    assert life("ab", save=False) == [1.0, 2.0]
    assert life("ba", save=False) == [2.0, 1.0], "each graph's rows, in another order of the list too"


def test_tables_of_two_stores_that_have_one_name_are_told_apart_by_their_places():
    stores = [Store(machine_of_part=[0], local=Shard(0)) for _ in range(2)]
    made = [gnnsys.DistEmbedding(store, ROWS, DIM, "e") for store in stores]
    other = gnnsys.DistEmbedding(stores[0], ROWS, DIM, "other")
    for listed in ([*made, other], [other, *made], [made[0], other, made[1]]):
        states = sort_states({"sparse": gnnsys.SparseAdam(listed)})
        saved = {name: {"spec": {"name": table.name}, "rows": None} for name, table in states.tables.items()}
        assert states.saved_tables(saved) == {name: name for name in saved}
        first = {f"sparse.{i}": {"spec": {"name": name}, "rows": None} for i, name in enumerate(("e", "e", "other"))}
        found = states.saved_tables(first)
        assert sorted(found.values()) == sorted(first)
        assert all(first[place]["spec"]["name"] == states.tables[name].name for name, place in found.items())
