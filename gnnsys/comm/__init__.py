"""Messages between the processes of a job: what they look like, who answers them, and who may."""

from gnnsys.comm.client import Client
from gnnsys.comm.errors import (
    Closed,
    CommError,
    DeadlineExceeded,
    PeerLost,
    RemoteError,
    RemoteValueError,
    ShardLost,
    TrainerLost,
    WireError,
)
from gnnsys.comm.keys import Keys
from gnnsys.comm.kinds import Kind
from gnnsys.comm.pending import Pending
from gnnsys.comm.request import Handler, Reply, Request
from gnnsys.comm.server import Server
from gnnsys.comm.wire import Limits, Message

__all__ = [
    "Client",
    "Closed",
    "CommError",
    "DeadlineExceeded",
    "Handler",
    "Keys",
    "Kind",
    "Limits",
    "Message",
    "PeerLost",
    "Pending",
    "RemoteError",
    "RemoteValueError",
    "Reply",
    "Request",
    "Server",
    "ShardLost",
    "TrainerLost",
    "WireError",
]
