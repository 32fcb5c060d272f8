"""What a process has while it takes part in a job: `init`, `open`, its machine's graph server and who keeps that up."""

from gnnsys.session.assistants import ASSISTANTS, Assistants, run_assistant
from gnnsys.session.begin_session import init, open
from gnnsys.session.graph_server import GraphServer, wait_for_end
from gnnsys.session.server_process import ServerProcess
from gnnsys.session.session import Session, current

__all__ = [
    "ASSISTANTS",
    "Assistants",
    "GraphServer",
    "ServerProcess",
    "Session",
    "current",
    "init",
    "open",
    "run_assistant",
    "wait_for_end",
]
