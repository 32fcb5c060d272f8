"""Scores of links from the rows of their ends: dot, bilinear, DistMult, ComplEx, TransE and RotatE.

All are one thing: the known end and the relation make a `query`, and a candidate for the other end is compared with it,
by a product or by a distance. So one link, the negatives of a batch and all nodes there are cost a query per link and a
comparison per candidate. Higher is more likely.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

End = Literal["head", "tail"]
_CHUNK = 1 << 22  # numbers that a comparison by modulus holds at once


class Decoder(nn.Module):
    """A score for (head, relation, tail).

    `dim` is the length of a node's row. `num_relations` is 0 where links have one kind. Subclasses state `query`, and
    what compares: "dot", "l1", "l2" or "modulus" (of complex numbers, reals first).
    """

    compares: str = "dot"
    needs_relations = False

    def __init__(self, dim: int, num_relations: int = 0) -> None:
        super().__init__()
        for name, value, least in (("dim", dim, 1), ("num_relations", num_relations, int(self.needs_relations))):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.dim, self.num_relations = dim, num_relations

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        """What candidates for the `wanted` end are compared with: [links, dim] from rows of the other end."""
        raise NotImplementedError(f"{type(self).__name__} has no query: state one, or scores of its own in forward")

    def forward(self, head: Tensor, tail: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        """Scores of links, [links], or of several candidates per link where the wanted end has [links, n, dim].

        `relation` is int64 [links].
        """
        known, candidates = (head, tail) if wanted == "tail" else (tail, head)
        query = self._checked(known, relation, wanted, candidates)
        if candidates.dim() == 3:
            query = query.unsqueeze(1)
        return self._compare(query, candidates)

    def score_all(
        self, known: Tensor, candidates: Tensor, relation: Tensor | None = None, wanted: End = "tail"
    ) -> Tensor:
        """Scores of every link with every candidate: [links, candidates] from [links, dim] and [candidates, dim]."""
        return self.compare_all(self._checked(known, relation, wanted, candidates), candidates)

    def compare_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """The same from queries."""
        dtype = torch.promote_types(query.dtype, candidates.dtype)
        query, candidates = query.to(dtype), candidates.to(dtype)
        if self.compares == "dot":
            return query @ candidates.t()
        if self.compares != "modulus":
            p, mode = (1.0 if self.compares == "l1" else 2.0), "donot_use_mm_for_euclid_dist"
            return -torch.cdist(query, candidates, p=p, compute_mode=mode)
        step = max(1, _CHUNK // max(1, query.shape[0] * self.dim))
        pieces = [self._compare(query.unsqueeze(1), piece.unsqueeze(0)) for piece in candidates.split(step)]
        return torch.cat(pieces, 1) if pieces else query.new_empty(query.shape[0], 0)

    def _compare(self, query: Tensor, candidates: Tensor) -> Tensor:
        if self.compares == "dot":
            return (query * candidates).sum(-1)
        difference = query - candidates
        if self.compares == "modulus":
            # In 16 bits squares overflow beyond 255, and are 0 below 0.0002.
            real, imaginary = _at_least_float32(difference).chunk(2, -1)
            square = real * real + imaginary * imaginary
            is_zero = square == 0  # a root has no gradient at 0; torch's norm has one, and takes 8 times as long
            modulus = square.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)
            return -modulus.sum(-1).to(difference.dtype)
        return -torch.linalg.vector_norm(difference, 1.0 if self.compares == "l1" else 2.0, dim=-1)

    def _checked(self, known: Tensor, relation: Tensor | None, wanted: End, candidates: Tensor) -> Tensor:
        if wanted not in ("head", "tail"):
            raise ValueError(f"wanted must be 'head' or 'tail', the end that candidates are for, got {wanted!r}")
        for what, rows in (("the known end", known), ("candidates", candidates)):
            if rows.shape[-1] != self.dim:
                raise ValueError(
                    f"{type(self).__name__} was made for rows of {self.dim} numbers, but {what} has "
                    f"{rows.shape[-1]}: pass dim={rows.shape[-1]}, or a model with {self.dim} outputs"
                )
        if known.dim() != 2 or candidates.dim() not in (2, 3):
            raise ValueError(
                "the known end has [links, dim] and candidates [links, dim] or [links, n, dim], got "
                f"{list(known.shape)} and {list(candidates.shape)}: `wanted` names the end of the candidates"
            )
        self.check_relations(relation, known.shape[0])
        return self.query(known, relation, wanted)

    def check_relations(self, relation: Tensor | None, num_links: int) -> None:
        """ValueError where they are not one number per link in [0, num_relations), or there are to be none."""
        if (relation is None) == (self.num_relations > 0):
            raise ValueError(
                f"{type(self).__name__} was made with num_relations={self.num_relations} and is called "
                f"{'without' if relation is None else 'with'} relations: "
                f"{'pass relation, int64 with one number per link' if relation is None else 'pass num_relations'}"
            )
        if relation is None:
            return
        if relation.shape != (num_links,) or relation.is_floating_point():
            raise ValueError(
                f"relation must be whole numbers [{num_links}], got {relation.dtype} {list(relation.shape)}"
            )
        on_host = relation.device.type == "cpu"  # elsewhere looking at them would wait for the device
        if on_host and relation.numel() and not 0 <= int(relation.min()) <= int(relation.max()) < self.num_relations:
            raise ValueError(
                f"relation must be in [0, {self.num_relations}), got {int(relation.min())} to {int(relation.max())}"
            )


class Dot(Decoder):
    """head . tail: symmetric, and without parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        return known


class Bilinear(Decoder):
    """head^T W_r tail, with one matrix where links have one kind (RESCAL, Nickel et al. 2011)."""

    def __init__(self, dim: int, num_relations: int = 0) -> None:
        super().__init__(dim, num_relations)
        self.weight = nn.Parameter(torch.empty(max(1, num_relations), dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for matrix in self.weight:
            nn.init.xavier_uniform_(matrix)

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        weight = (self.weight if wanted == "tail" else self.weight.transpose(1, 2)).to(known.dtype)
        if relation is None:
            return known @ weight[0]
        order = relation.argsort(stable=True)
        sizes = torch.bincount(relation, minlength=self.num_relations).tolist()
        pieces = [rows @ each for rows, each in zip(known[order].split(sizes), weight, strict=True)]
        return torch.cat(pieces)[order.argsort()]


class _RelationRows(Decoder):
    """One with a row for each relation."""

    needs_relations = True

    def __init__(self, dim: int, num_relations: int, size: int | None = None) -> None:
        super().__init__(dim, num_relations)
        self.relation = nn.Parameter(torch.empty(num_relations, dim if size is None else size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.relation)

    def _rows(self, relation: Tensor | None) -> Tensor:
        assert relation is not None
        return self.relation[relation]


class DistMult(_RelationRows):
    """sum of head * relation * tail (Yang et al. 2015): a link and its reverse score alike."""

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        return known * self._rows(relation)


class ComplEx(_RelationRows):
    """The real part of sum of head * relation * conj(tail) (Trouillon et al. 2016).

    Rows are complex numbers, first all real parts, then all imaginary ones.
    """

    def __init__(self, dim: int, num_relations: int) -> None:
        _check_even(type(self).__name__, dim)
        super().__init__(dim, num_relations)

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        if wanted == "tail":
            return _times(known, self._rows(relation))
        return _times(known, _conj(self._rows(relation)))


class TransE(_RelationRows):
    """- |head + relation - tail| by the norm `p`, 1 or 2 (Bordes et al. 2013)."""

    def __init__(self, dim: int, num_relations: int, p: int = 1) -> None:
        if p not in (1, 2):
            raise ValueError(f"p must be 1 or 2, got {p!r}")
        self.compares = f"l{p}"
        super().__init__(dim, num_relations)

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        rows = self._rows(relation)
        return known + rows if wanted == "tail" else known - rows


class RotatE(_RelationRows):
    """- sum of |head * relation - tail| over complex numbers, where a relation turns by angles (Sun et al. 2019).

    Rows are complex numbers, first all real parts, then all imaginary ones. `relation` holds the angles.
    """

    compares = "modulus"

    def __init__(self, dim: int, num_relations: int) -> None:
        _check_even(type(self).__name__, dim)
        super().__init__(dim, num_relations, dim // 2)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.relation, -math.pi, math.pi)

    def query(self, known: Tensor, relation: Tensor | None = None, wanted: End = "tail") -> Tensor:
        angle = self._rows(relation)
        angle = angle if wanted == "tail" else -angle
        return _times(known, torch.cat([angle.cos(), angle.sin()], -1))


def _check_even(name: str, dim: int) -> None:
    if dim % 2:
        raise ValueError(f"{name} has complex numbers, two of a row each: dim must be even, got {dim}")


def _at_least_float32(rows: Tensor) -> Tensor:
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Products of complex numbers, whose real parts come first."""
    (a_re, a_im), (b_re, b_im) = a.chunk(2, -1), b.chunk(2, -1)
    return torch.cat([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], -1)


def _conj(a: Tensor) -> Tensor:
    real, imaginary = a.chunk(2, -1)
    return torch.cat([real, -imaginary], -1)
