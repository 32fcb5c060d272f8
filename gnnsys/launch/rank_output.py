"""From torchrun's output to lines of ranks.

`rank_pipes.py` writes what ranks print piece by piece, each behind a header with the rank. A line that comes in several
pieces has several headers: here it becomes one line again.
"""

from __future__ import annotations

from collections.abc import Iterator

BEGIN, END = "\x1e", "\x1f"
MOST_LINE = 1 << 16  # a longer line is cut into several


class RankOutput:
    """Takes a stream's text as it comes, gives (rank, line); rank is None for what torchrun itself says."""

    def __init__(self) -> None:
        self._partial: dict[int | None, str] = {}
        self._speaker: int | None = None  # whose line is under way: a header stands for one line at most
        self._rest = ""  # a header that has not come whole

    def feed(self, text: str) -> Iterator[tuple[int | None, str]]:
        begun, *pieces = (self._rest + text).split(BEGIN)
        self._rest = ""
        if pieces and END not in pieces[-1]:
            self._rest = BEGIN + pieces.pop()
        yield from self._hear(begun)
        for piece in pieces:
            rank, _, said = piece.partition(END)
            self._speaker = int(rank) if rank.isdecimal() else None
            yield from self._hear(said)

    def _hear(self, said: str) -> Iterator[tuple[int | None, str]]:
        line, newline, own = said.partition("\n")
        yield from self._add(self._speaker, line + newline)
        if newline:
            self._speaker = None
            yield from self._add(None, own)

    def close(self) -> Iterator[tuple[int | None, str]]:
        """What came without an end of line."""
        for rank, text in self._partial.items():
            if text:
                yield rank, text
        self._partial.clear()

    def _add(self, rank: int | None, text: str) -> Iterator[tuple[int | None, str]]:
        if not text:
            return
        *lines, last = (self._partial.get(rank, "") + text).split("\n")
        while len(last) > MOST_LINE:
            lines.append(last[:MOST_LINE])
            last = last[MOST_LINE:]
        self._partial[rank] = last
        for line in lines:
            yield rank, line
