"""States of sparse optimizers: what is refused, what older ones were, and whose options they are."""

from __future__ import annotations

import pytest

from gnnsys.store import DistEmbedding, SparseAdagrad, SparseAdam
from tests.store.cluster import alone

ROWS, DIM = 40, 4


def test_states_of_optimizers_are_checked_and_those_of_before_groups_still_load():
    with alone() as store:
        embedding = DistEmbedding(store, ROWS, DIM, "emb")
        optimizer = SparseAdam([embedding], lr=0.1)
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match="the state is of 'adam', this optimizer is 'adagrad'"):
            SparseAdagrad([embedding]).load_state_dict(state)
        broken = {**state, "param_groups": [{**state["param_groups"][0], "lr": "much"}]}
        with pytest.raises(ValueError, match="lr must be a finite number"):
            optimizer.load_state_dict(broken)
        optimizer.load_state_dict({"kind": "adam", "lr": 0.3, "beta1": 0.5, "beta2": 0.6, "eps": 1e-4})
        assert (optimizer.lr, optimizer.betas, optimizer.eps) == (0.3, (0.5, 0.6), 1e-4)
        optimizer.load_state_dict(state)
        assert (optimizer.lr, optimizer.betas, optimizer.eps) == (0.1, (0.9, 0.999), 1e-8)
        older = {
            **state,
            "param_groups": [{k: v for k, v in g.items() if k != "reduction"} for g in state["param_groups"]],
        }
        for reduction in ("mean", "sum"):  # a state that does not say leaves it, one that says decides
            chosen = SparseAdam([embedding], reduction=reduction)
            chosen.load_state_dict(older)
            assert chosen.param_groups[0]["reduction"] == reduction
            chosen.load_state_dict(state)
            assert chosen.param_groups[0]["reduction"] == "mean"
        second = DistEmbedding(store, ROWS, DIM, "second")
        both = SparseAdam([{"params": [embedding], "reduction": "sum"}, {"params": [second]}])
        (one,) = older["param_groups"]
        both.load_state_dict({"kind": "adam", "param_groups": [{**one, "lr": 0.2}, {**one, "lr": 0.3}], "state": {}})
        assert [(group["reduction"], group["lr"]) for group in both.param_groups] == [("sum", 0.2), ("mean", 0.3)]
        other = SparseAdagrad([embedding])
        other.load_state_dict({"kind": "adagrad", "lr": 0.3, "lr_decay": 0.5, "initial": 0.6, "eps": 1e-4})
        assert (other.lr, other.lr_decay, other.initial_accumulator_value, other.eps) == (0.3, 0.5, 0.6, 1e-4)


def test_options_of_a_group_never_go_to_the_tables_of_another():
    with alone() as store:
        a, b, c = (DistEmbedding(store, ROWS, DIM, name) for name in "abc")
        first = SparseAdam([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.01}])
        state = first.state_dict()
        for groups in ([[c, b], [a]], [[c], [a, b]], [[a], [b, c]]):  # the first as large as those that were saved
            other = SparseAdam([{"params": group} for group in groups], lr=7.0)
            with pytest.raises(ValueError, match=r"list the groups as they were then, \[\['a', 'b'\], \['c'\]\]"):
                other.load_state_dict(state)
            assert [group["lr"] for group in other.param_groups] == [7.0, 7.0], "nothing was taken"
        older = {key: value for key, value in state.items() if key != "tables"}
        renamed = DistEmbedding(store, ROWS, DIM, "renamed")
        for given, groups in ((state, [[b, a], [c]]), (state, [[a, renamed], [c]]), (older, [[a, b], [c]])):
            same = SparseAdam([{"params": group} for group in groups], lr=7.0)
            same.load_state_dict(given)
            assert [group["lr"] for group in same.param_groups] == [0.1, 0.01]
