"""What layers accept as edges, what they refuse, and what they remember."""

import gc

import pytest
import torch

from gnnsys.nn import SAGEConv
from gnnsys.nn.layer_inputs import from_edge_index, resolve
from gnnsys.ops import CSC
from gnnsys.ops.memo import Memo
from gnnsys.sampling import Block

EDGE = ("node", "to", "node")


def test_edge_index_csc_and_block_give_one_result(edge_index, rows):
    conv, x = SAGEConv(12, 5).double(), rows(40, 12)
    csc = CSC.from_edge_index(edge_index, 40)
    block = Block({EDGE: csc}, {"node": 40}, {"node": 40})
    assert torch.equal(conv(x, edge_index), conv(x, csc))
    assert torch.equal(conv(x, edge_index.int()), conv(x, block))


def test_an_edge_index_is_converted_once_while_it_lives(edge_index):
    first, _ = from_edge_index(edge_index, 40, 40)
    assert from_edge_index(edge_index, 40, 40)[0] is first
    assert from_edge_index(edge_index.clone(), 40, 40)[0] is not first


def test_writing_into_an_edge_index_is_noticed(edge_index, rows):
    conv, x = SAGEConv(12, 5).double(), rows(40, 12)
    before = conv(x, edge_index)
    edge_index[:, :50] = edge_index[:, :50].flip(0)
    assert not torch.equal(conv(x, edge_index), before)
    assert torch.equal(conv(x, edge_index), conv(x, edge_index.clone()))


def test_writing_through_a_view_is_noticed(edge_index):
    first, _ = from_edge_index(edge_index, 40, 40)
    edge_index[0].zero_()
    assert from_edge_index(edge_index, 40, 40)[0] is not first


def test_another_number_of_nodes_is_another_structure(edge_index):
    assert from_edge_index(edge_index, 41, 41)[0].num_dst == 41
    assert from_edge_index(edge_index, 40, 40)[0].num_dst == 40


def test_tensors_made_in_inference_mode_are_never_remembered():
    memo, made = Memo(), []
    with torch.inference_mode():
        tensor = torch.zeros(3)
        memo.get(lambda: made.append(1), tensor, key="k")
        tensor.add_(1)
        memo.get(lambda: made.append(2), tensor, key="k")
    assert made == [1, 2] and len(memo) == 0


def test_what_was_remembered_goes_with_its_source():
    memo, tensor = Memo(), torch.zeros(3)
    memo.get(lambda: "result", tensor, key="k")
    assert len(memo) == 1
    del tensor
    gc.collect()
    assert len(memo) == 0


def test_the_memo_is_bounded_and_forgets_what_was_not_used_for_longest():
    memo, tensors, made = Memo(capacity=2), [torch.zeros(1) for _ in range(3)], []
    for index in (0, 1, 0, 2, 0, 1):
        memo.get(lambda index=index: made.append(index), tensors[index], key="k")
    assert made == [0, 1, 2, 1] and len(memo) == 2


@pytest.mark.parametrize(
    "x_rows, edges, message",
    [
        (39, CSC(torch.tensor([0, 1]), torch.tensor([0]), 40), "x has 39 rows of sources, but edges has 40"),
        (1, CSC(torch.tensor([0, 1, 1]), torch.tensor([0]), 1), "x must be a pair"),
        (40, torch.zeros(3, 5, dtype=torch.int64), r"edge_index must have shape \[2, num_edges\]"),
        (40, torch.zeros(2, 5), "edge_index must be int64 or int32, got torch.float32"),
        (40, torch.tensor([[0], [40]]), "40"),
        (40, [[0], [1]], "edges must be a Block, a CSC or an edge_index tensor, got list"),
    ],
)
def test_bad_input_is_a_value_error_that_names_it(x_rows, edges, message, rows):
    with pytest.raises(ValueError, match=message):
        resolve(rows(x_rows, 4), edges)


def test_a_block_with_several_edge_types_is_refused():
    csc = CSC(torch.tensor([0, 1]), torch.tensor([0]), 1)
    block = Block({("a", "r", "b"): csc, ("b", "s", "b"): csc}, {"a": 1, "b": 1}, {"b": 1})
    with pytest.raises(ValueError, match="edges must have one edge type"):
        resolve(torch.zeros(1, 4), block)


def test_an_edge_tensor_of_the_wrong_length_is_refused(edge_index, rows):
    with pytest.raises(ValueError, match=r"edge_weight has shape \[7\], expected 200 rows"):
        resolve(rows(40, 4), edge_index).edge_rows(torch.zeros(7), "edge_weight")
