"""Bad use, and what a trace cannot follow, is one line that names the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gnnsys.planning import TraceEnds, TrainingJob, estimate_memory, find_job, make_job, probe_memory
from tests.planning.memory import jobs
from tests.planning.memory.allocations import allocated_peak
from tests.support.grid import grid


def linear_job(loss, **more) -> TrainingJob:
    model = more.pop("model", None) or nn.Linear(8, 4)
    optimizer = more.pop("optimizer", torch.optim.SGD)(model.parameters(), 0.1)
    return TrainingJob(model=model, optimizer=optimizer, loss=loss, rows=torch.randn(32, 8), **more)


def test_a_size_that_depends_on_rows_names_the_operator_and_the_module():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 4)

        def forward(self, rows):
            rows = self.lin(rows)
            return rows[rows.sum(1) > 0]

    with pytest.raises(ValueError, match=r"^aten::(nonzero|index) in Chosen asks for .* depends on rows"):
        estimate_memory(lambda: linear_job(lambda model, graph: model(graph.x).mean(), model=Chosen()))


def test_a_value_of_rows_names_the_operator():
    def loss(model, graph):
        out = model(graph.x).mean()
        out.item()
        return out

    with pytest.raises(ValueError, match="aten::_local_scalar_dense asks for a value"):
        estimate_memory(lambda: linear_job(loss))


def test_an_operator_without_a_fake_kernel_is_named():
    @torch.library.custom_op("gnnsys_test::doubled", mutates_args=())
    def doubled(rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    with pytest.raises(ValueError, match=r"gnnsys_test::doubled.* tells no shapes: register"):
        estimate_memory(lambda: linear_job(lambda model, graph: model(graph.x).mean() + doubled(graph.x).mean()))


def test_sizes_that_depend_on_indices_are_no_obstacle():
    """A mask of labels, their different values, the number of edges of a node: all are real."""
    labels = torch.arange(32) % 5

    def loss(model, graph):
        out = model(graph.x)
        classes = labels.unique()
        picked = out[labels == int(classes.max())]
        return picked.mean() + out[labels.bincount().argmax() :].mean()

    found = estimate_memory(lambda: linear_job(loss))
    assert found.peak_bytes > 32 * 8 * 4


def test_a_counter_that_rows_are_written_into_is_no_longer_known():
    hits = torch.zeros(1, dtype=torch.int64)

    def loss(model, graph):
        out = model(graph.x)
        hits.copy_((out > 0).sum())
        return out.mean() * torch.ones(int(hits), 1).mean()

    with pytest.raises(ValueError, match="_local_scalar_dense asks for a value"):
        estimate_memory(lambda: linear_job(loss))


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(8, 4))
    model[0]._compiled_call_impl = model[0]._call_impl  # what Module.compile() sets, without the compiler's imports
    with pytest.raises(ValueError, match=r"^0 is compiled by torch.compile.*without compile"):
        estimate_memory(lambda: linear_job(lambda model, graph: model(graph.x).mean(), model=model))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (3, "returned a int; a job returns TrainingJob"),
        ({"model": 1}, r"returned a dict with \['model'\]; a job returns"),
        ({"model": nn.Linear(1, 1), "optimizer": 3, "loss": print, "rows": 1}, "optimizer must be a torch.optim"),
        ({"model": 3, "optimizer": 3, "loss": print, "rows": 1}, "model must be a torch.nn.Module, got a int"),
    ],
)
def test_a_function_that_returns_something_else_is_told_what_a_job_is(made, said):
    with pytest.raises(ValueError, match=said):
        make_job(lambda: made, {})


def test_a_job_has_a_loader_or_a_graph():
    model = nn.Linear(1, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": print}
    with pytest.raises(ValueError, match="either loader= or rows="):
        TrainingJob(**given)
    with pytest.raises(ValueError, match="loader has no batches"):
        estimate_memory(lambda: TrainingJob(**given, loader=[]))


def test_arguments_are_json_and_those_of_the_function():
    with pytest.raises(ValueError, match="argument kind is a tensor of shape"):
        make_job(jobs.gnn, {"kind": torch.ones(2)})
    with pytest.raises(ValueError, match=r"gnn cannot be called with \['depth'\]: .*unexpected"):
        make_job(jobs.gnn, {"depth": 3})
    with pytest.raises(ValueError, match="num_steps must be at least 2"):
        estimate_memory(jobs.gnn, num_steps=1)
    with pytest.raises(ValueError, match="device must be one of cpu, h200, got 'tpu'"):
        estimate_memory(jobs.gnn, device="tpu")


def test_a_job_is_found_by_module_and_function():
    assert find_job("tests.planning.memory.jobs:gnn") is not None
    for name, said in [
        ("train", "a job is MODULE:FUNCTION"),
        ("no_such_module:job", "there is no module 'no_such_module'"),
        ("tests.planning.memory.jobs:no_such", "has no function 'no_such'"),
        ("tests.planning.memory.jobs:gnnn", "has no function 'gnnn': did you mean 'gnn'"),
        ("no_such_module.py:job", "write no_such_module:job"),
    ]:
        with pytest.raises(ValueError, match=said):
            find_job(name)


def sparse_buffer(layout: torch.layout) -> TrainingJob:
    model = nn.Linear(8, 4)
    model.register_buffer("adjacency", torch.eye(32).to_sparse(layout=layout))
    return linear_job(lambda model, graph: (model.adjacency @ model(graph.x)).mean(), model=model)


def sparse_gradient() -> TrainingJob:
    table = nn.Embedding(1000, 16, sparse=True)
    return TrainingJob(
        model=table, optimizer=torch.optim.SparseAdam(list(table.parameters())), rows=torch.arange(50),
        loss=lambda table, graph: table(graph.x).mean(),
    )  # fmt: skip


def sparse_edges() -> TrainingJob:
    edges = torch.eye(32).to_sparse()
    return linear_job(lambda model, graph: torch.sparse.mm(graph.edge_index, model(graph.x)).mean(), edge_index=edges)


@grid(
    make={
        "a buffer in coordinates": lambda: sparse_buffer(torch.sparse_coo),
        "a buffer by rows": lambda: sparse_buffer(torch.sparse_csr),
        "a gradient": sparse_gradient,
        "edges": sparse_edges,
    }
)
@pytest.mark.filterwarnings("ignore:Sparse C")
def test_a_sparse_tensor_ends_a_trace_and_the_job_is_probed(make):
    with pytest.raises(TraceEnds, match=r"aten::\w+.* takes or makes a sparse tensor, .*: use gnnsys.ops.spmm"):
        estimate_memory(make)
    job = make()
    start = sum(weight.nbytes for weight in job.model.parameters())
    taken = start + allocated_peak(job)  # with what a product by rows copies inside
    assert 0.9 * taken <= probe_memory(make).peak_bytes <= 1.6 * taken


def test_an_optimizer_that_calls_a_closure_is_refused_when_the_job_is_made():
    with pytest.raises(ValueError, match=r"LBFGS computes the loss several times in a step, .* such as Adam"):
        estimate_memory(lambda: linear_job(None, optimizer=torch.optim.LBFGS))


def test_a_loss_of_many_values_is_refused():
    with pytest.raises(ValueError, match=r"must return a tensor of one value, got a tensor of shape \[32, 4\]"):
        estimate_memory(lambda: linear_job(lambda model, graph: model(graph.x)))
