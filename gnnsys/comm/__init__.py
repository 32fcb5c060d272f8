"""Messages between the processes of a job: what they look like, who answers them, and who may."""

from gnnsys.comm.address import LOOPBACK, agree_on_address, endpoint, find_address, interface_of, is_loopback, resolve
from gnnsys.comm.arrays import CODE_OF, DTYPE_OF, DTYPES, FRAME_BYTES, INLINE_BELOW, export_array
from gnnsys.comm.bounded_store import BoundedStore
from gnnsys.comm.child_lifetime import close_in_forks, end_with_parent
from gnnsys.comm.client import Client
from gnnsys.comm.client_quotas import ClientQuotas
from gnnsys.comm.context import BatchLoop, Consumer, RequestContext, current_context, use_context
from gnnsys.comm.device_place import DevicePlace, place_of
from gnnsys.comm.egress import Egress, check_order
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
from gnnsys.comm.fair_queue import FairQueue
from gnnsys.comm.joining import LaunchInfo, join
from gnnsys.comm.key_file import make_key, read_key
from gnnsys.comm.keys import CURVE, OLDEST_CRYPTOGRAPHY, Keys, check_can_seal
from gnnsys.comm.kinds import Kind
from gnnsys.comm.lanes import default_lanes, default_server_io_threads, default_server_threads
from gnnsys.comm.pending import Pending
from gnnsys.comm.rank_exchange import RankExchange
from gnnsys.comm.rendezvous import Group, RendezvousError
from gnnsys.comm.reply_pacing import LINK_PAYLOAD
from gnnsys.comm.request import Handler, Reply, Request, ShortReply
from gnnsys.comm.sealing import sealing_seconds
from gnnsys.comm.server import Server
from gnnsys.comm.unnamed_memory import UnnamedMemory
from gnnsys.comm.urgency import BACKGROUND, user_priority
from gnnsys.comm.wire import HEADER_BYTES, Header, Limits, Message

# Old names, kept for one version.
Accounts = ClientQuotas
Peers = RankExchange
Place = LaunchInfo
Turns = FairQueue

__all__ = [
    "BACKGROUND",
    "CODE_OF",
    "CURVE",
    "DTYPES",
    "DTYPE_OF",
    "FRAME_BYTES",
    "HEADER_BYTES",
    "INLINE_BELOW",
    "LINK_PAYLOAD",
    "LOOPBACK",
    "OLDEST_CRYPTOGRAPHY",
    "Accounts",
    "BatchLoop",
    "BoundedStore",
    "Client",
    "ClientQuotas",
    "Closed",
    "CommError",
    "Consumer",
    "DeadlineExceeded",
    "DevicePlace",
    "Egress",
    "FairQueue",
    "Group",
    "Handler",
    "Header",
    "Keys",
    "Kind",
    "LaunchInfo",
    "Limits",
    "Message",
    "PeerLost",
    "Peers",
    "Pending",
    "Place",
    "RankExchange",
    "RemoteError",
    "RemoteValueError",
    "RendezvousError",
    "Reply",
    "Request",
    "RequestContext",
    "Server",
    "ShardLost",
    "ShortReply",
    "TrainerLost",
    "Turns",
    "UnnamedMemory",
    "WireError",
    "agree_on_address",
    "check_can_seal",
    "check_order",
    "close_in_forks",
    "current_context",
    "default_lanes",
    "default_server_io_threads",
    "default_server_threads",
    "end_with_parent",
    "endpoint",
    "export_array",
    "find_address",
    "interface_of",
    "is_loopback",
    "join",
    "make_key",
    "place_of",
    "read_key",
    "resolve",
    "sealing_seconds",
    "use_context",
    "user_priority",
]
