"""What all our layers are, besides modules: they have two halves, and PyG's transformations of models take them.

PyG's `to_hetero` makes of a model one for typed graphs. It traces the model, and copies what is a `MessagePassing` once
per edge type and everything else once per node type. Our layers are none, and need no PyG. So a layer that notices that
PyG traces it puts on a class that is both, until PyG has looked and makes its copies, which are plain again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from gnnsys.graph import NodeType, in_words
from gnnsys.nn.halves import Halves, RowWeights
from gnnsys.nn.input_errors import ERRORS, may_be_rows, why_unfit
from gnnsys.nn.plain import note_written
from gnnsys.ops import CSC

_PYG_TRACER = "torch_geometric.nn.fx"


def traced_by_pyg(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module is called with these in the course of one of PyG's transformations."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Proxy) and type(value.tracer).__module__ == _PYG_TRACER:
            return True
    return False


def check_edge_rows(model: nn.Module, names: Iterable[str], layers: Iterable[nn.Module], suffix: str = "") -> None:
    """ValueError for rows of edges that a model is called with and that one of its layers does not take.

    `suffix` is what the model's names have in addition to those of its layers.
    """
    if torch.compiler.is_compiling():  # the layer itself refuses them then
        return
    for kind, layer in {type(layer): layer for layer in layers}.items():
        known = _edge_rows_of(kind)  # type: ignore[arg-type]
        if known is None:
            continue
        for name in names:
            if name.removesuffix(suffix) not in known:
                takes = in_words([each + suffix for each in known]) if known else "no rows of edges"
                instead = _INSTEAD if name.startswith("num_sampled") else ""
                shown = getattr(layer, "layer_name", kind.__name__)
                raise ValueError(f"{type(model).__name__} has no argument {name!r}: {shown} takes {takes}{instead}")


def takes_edge_rows(layer: nn.Module, name: str) -> bool:
    """Whether a layer has an argument of this name for rows of edges. True while a model is compiled."""
    if torch.compiler.is_compiling():
        return True
    known = _edge_rows_of(type(layer))  # type: ignore[arg-type]
    return known is None or name in known


_INSTEAD = ". To trim a batch, pass num_sampled_nodes alone: the edges of each layer follow from it"


@functools.lru_cache
def _edge_rows_of(kind: type[nn.Module]) -> tuple[str, ...] | None:
    """Arguments of a layer's `forward` that may have a row for each edge; None where it takes any."""
    parameters = list(inspect.signature(kind.forward).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return tuple(each.name for each in parameters[3:] if each.name not in ("size", "return_attention_weights"))


class GraphLayer(nn.Module):
    """A layer that passes messages over edges. Its `forward` takes rows and a structure, and is made of the two halves.

    `decides` names those of its settings that say how it is computed in halves: they may be changed at any time.
    """

    decides: ClassVar[tuple[str, ...]] = ()

    def transform(self, rows: Any) -> Any:
        """The dense half, row by row: rows, or what more the sparse half needs of them."""
        raise NotImplementedError(f"{type(self).__name__} has no dense half of its own")

    def aggregate(self, csc: CSC, rows: Any, edge_rows: Tensor | None = None) -> Any:
        """The sparse half, over edges: rows of destinations from those of sources; `edge_rows` by position."""
        raise NotImplementedError(f"{type(self).__name__} has no sparse half of its own")

    def halves(self) -> Halves | None:
        """How the layer is computed from sums over in-edges, as it is now; None where it can only be called.

        A layer that states them asks `is_untouched` first: a subclass, or a module that somebody has changed, is
        called.
        """
        return None

    def row_weights(self) -> RowWeights | str:
        """The weights that rows are multiplied by first, as the layer is now; or what else it does to them."""
        return "does other things to rows than to multiply them"

    def draws(self) -> bool:
        """Whether a call draws random numbers that `forward_keyed` can take from elsewhere."""
        return False

    def forward_keyed(self, rows: Tensor, csc: CSC, ids: Tensor, key: int, **edge_rows: Any) -> Tensor:
        """`forward` with random numbers by key and destination, `ids` [num_dst]: the same on any piece of a graph."""
        raise NotImplementedError(f"{type(self).__name__} draws no random numbers")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_written(cls, "forward", "__call__", "transform", "aggregate")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traced_by_pyg(args, kwargs):
            self.__class__ = _shown_to_pyg(type(self))  # type: ignore[assignment, arg-type]
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except ERRORS as error:
            if not may_be_rows(self, error):
                raise
            why = self._why_failed(error, args[0] if args else kwargs.get("x"))
            if why is None:
                raise
            raise ValueError(why) from error

    def _why_failed(self, error: Exception, x: Any) -> str | None:
        """What is wrong with the rows of a call that failed, and what to write; None if it is not the rows."""
        is_said = isinstance(error, ValueError) and not isinstance(x, Tensor)  # what the layer takes instead
        return None if is_said else why_unfit(self, x)

    def register_message_forward_hook(self, *_: Any) -> None:
        """PyG's `to_hetero_with_bases` weighs messages by the type of their edge."""
        raise ValueError(
            f"{type(self).__name__} of gnnsys.nn makes no tensor of messages, and PyG's to_hetero_with_bases changes "
            "those: use to_hetero, gnnsys.nn.RGCNConv(num_bases=...), or PyG's layer of the same name"
        )


class TypedLayer(nn.Module):
    """A layer or model on rows by node type. Where a call fails, the error names the type whose rows do not fit."""

    def why_unfit(self, x: Mapping[NodeType, Any]) -> str | None:
        """What is wrong with the rows, and what to write; None if it is not the rows. Asked only after an error."""
        raise NotImplementedError(f"{type(self).__name__} does not say which rows it takes")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        except ERRORS as error:
            x = args[0] if args else kwargs.get("x")
            why = self.why_unfit(x) if may_be_rows(self, error) and isinstance(x, Mapping) else None
            if why is None or why == str(error):  # or a layer has said so
                raise
            raise ValueError(why) from error


@functools.lru_cache
def _shown_to_pyg(kind: type[nn.Module]) -> type[nn.Module]:
    from torch_geometric.nn.conv import MessagePassing

    if issubclass(kind, MessagePassing):
        return kind

    class Shown(kind, MessagePassing):  # type: ignore[misc, valid-type]
        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copied, pickled: PyG has looked."""
            self.__class__ = kind  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)

    Shown.__name__, Shown.__qualname__, Shown.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Shown
