"""What a handler is given and what it returns: no socket in it, so that a room's service can be tested by a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Union

from torch import Tensor

from gnnsys.comm import urgency
from gnnsys.comm.context import current_context, first_given
from gnnsys.comm.wire import Header, Message, make_header


class Request(Message):
    """A message that a handler answers, and until when. `chunk_bytes(most)` says how large the next chunk of the reply
    should be: it changes while a reply is sent, so ask for each chunk."""

    __slots__ = ("chunk_bytes", "deadline", "message")

    def __init__(self, message: Message, deadline: float, chunk_bytes: Callable[[int], int] = int) -> None:
        super().__init__(message.header, message.arrays, message.options)
        self.message = message
        self.deadline = deadline  # time.monotonic()
        self.chunk_bytes = chunk_bytes

    @classmethod
    def local(
        cls, kind: int, arrays: Sequence[Tensor] = (), options: dict[str, Any] | None = None, *, timeout: float = 60.0,
        sender: int = 0, incarnation: int = 0, sequence: int = 0, batch: int = -1, layer: int = -1, loader: int = 0,
        priority: int | None = None, path: int | None = None,
    ) -> Request:  # fmt: skip
        """A request that came over no network: how a process alone, and a test, calls a handler.

        What is left out is as the current `RequestContext` says, as in `Client.request`.
        """
        context = current_context()
        header = make_header(
            kind, 0, timeout_us=int(timeout * 1e6), sender=sender, incarnation=incarnation, sequence=sequence,
            batch=context.batch if batch < 0 else batch, layer=layer, loader=loader or context.loader,
            priority=urgency.of_request(kind, context.need, layer, first_given(priority, context.priority)),
            path=first_given(path, context.path),
        )  # fmt: skip
        return cls(Message(header, list(arrays), options or {}), time.monotonic() + timeout)

    def remaining(self) -> float:
        """Seconds to the request's deadline; not below zero."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(slots=True)
class Reply:
    """What a handler answers, or one chunk of it.

    Large arrays are sent without a copy: they must not change afterwards. `last=True` on the final chunk of an iterator
    spares the message that otherwise tells the end.
    """

    arrays: Sequence[Tensor] = ()
    options: dict[str, Any] | None = None
    last: bool = False


HandlerResult = Union[Reply, Iterator[Reply], "Future[Reply]"]
Handler = Callable[[Request], HandlerResult]
Handlers = Mapping[int, Handler]


# A reply that is encoded, but for its header: its frames, with room for the header at the beginning of the first one,
# and how many arrays they have.
ShortReply = tuple[list[Any], int]

# Answers a request from its only frame, in no more time than handing it to a worker takes; None: the handler must.
ShortHandler = Callable[[Header, memoryview], "ShortReply | None"]
