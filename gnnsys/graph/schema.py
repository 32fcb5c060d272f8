"""Names of node and edge types, and the number that stands for an edge type in the sampler's key."""

from __future__ import annotations

from typing import TypeAlias

NodeType: TypeAlias = str
EdgeType: TypeAlias = tuple[str, str, str]

NODE: NodeType = "node"
EDGE: EdgeType = ("node", "to", "node")


def edge_type_key(edge_type: EdgeType) -> int:
    """A number that depends on the edge type's names alone (FNV-1a, 63 bits), 0 for the homogeneous one.

    The sampler's random stream is keyed by it, so the order in which types are listed never changes a sample.
    """
    if edge_type == EDGE:
        return 0
    value = 0xCBF29CE484222325
    for byte in "\x1f".join(edge_type).encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value & 0x7FFFFFFFFFFFFFFF
