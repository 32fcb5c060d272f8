"""The job's key: one CURVE pair that every process of the job has. Who does not have it is refused before any message.

Both ends use the same pair: a client proves that it owns the secret key of the one public key that servers admit.
`encrypts` says what travels how. True: control over CURVE, rows sealed frame by frame (`sealing`). "curve": all over
CURVE, which costs more than the network where links are fast. False: in clear. Servers then still admit only who knows
the key (libzmq's PLAIN), but whoever can read the wire reads it, and the key with it.
"""

from __future__ import annotations

import contextlib
import hmac
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import zmq
from zmq.utils import z85

CURVE = "curve"  # of `encrypts`
OLDEST_CRYPTOGRAPHY = "47"  # whose ciphers write into memory that is there
BULK_DOMAIN = b"gnnsys-bulk"  # of the port for sealed messages
_ZAP = "inproc://zeromq.zap.01"  # where libzmq asks, in the context of the socket (RFC 27)


@dataclass(frozen=True)
class Keys:
    """A CURVE key pair in libzmq's own notation (40 characters of Z85 each). Its text never shows the secret key."""

    public: str
    secret: str = field(repr=False)
    encrypts: bool | str = True

    def __post_init__(self) -> None:
        for name in ("public", "secret"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) != 40 or not value.isascii():
                raise ValueError(f"the {name} key must be 40 characters of Z85; make a pair with Keys.generate()")
        if not (isinstance(self.encrypts, bool) or self.encrypts == CURVE):
            raise ValueError(f"encrypts is True, False or {CURVE!r}, not {self.encrypts!r}")

    @property
    def seals(self) -> bool:
        """Whether rows are sealed frame by frame."""
        return self.encrypts is True

    @classmethod
    def generate(cls, *, encrypts: bool | str = True) -> Keys:
        """A new pair. ValueError if rows are to be sealed and this host cannot."""
        if encrypts is True:
            check_can_seal()
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode(), encrypts)

    def to_json(self) -> dict[str, Any]:
        keys = {"public": self.public, "secret": self.secret}
        return keys if self.seals else {**keys, "encrypts": self.encrypts}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Keys:
        if not isinstance(value, dict) or set(value) - {"encrypts"} != {"public", "secret"}:
            raise ValueError('keys are an object with "public" and "secret"')
        return cls(value["public"], value["secret"], value.get("encrypts", True))

    def protect_client(self, socket: zmq.Socket) -> None:
        """Before `connect`: speak to a server of this job only. Without encryption the server proves nothing."""
        if not self.encrypts:
            socket.plain_username = self.public.encode()
            socket.plain_password = self.secret.encode()
            return
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.public.encode()

    def protect_server(self, socket: zmq.Socket) -> None:
        """Before `bind`: answer only who owns this pair. The context needs a `Gate`."""
        socket.zap_domain = b"gnnsys"
        if not self.encrypts:
            socket.plain_server = True
            return
        socket.curve_server = True
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


def check_can_seal() -> None:
    """Raises ValueError, with what to install, if this host cannot seal rows.

    Without this check the first pull would fail, and look like a server that does not answer.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into"):
            return
        found = f"version {version('cryptography')}"
    except (ImportError, PackageNotFoundError) as error:
        found = f"none that can be imported ({error})"
    raise ValueError(
        f"rows between machines are sealed by the package cryptography, {OLDEST_CRYPTOGRAPHY} or newer, and "
        f"{platform.node() or 'this host'} has {found}: pip install 'cryptography>={OLDEST_CRYPTOGRAPHY}', or use "
        "gnnsys.init(encrypt='curve'), which does without"
    )


def protect_bulk_client(socket: zmq.Socket, session: bytes, token: bytes) -> None:
    """Before `connect` to a bulk port: show the token of a session. The server proves nothing before its messages."""
    socket.plain_username = session.hex().encode()
    socket.plain_password = token.hex().encode()


def protect_bulk_server(socket: zmq.Socket) -> None:
    """Before `bind` of a bulk port: answer only who has the token of a session. The context needs a `Gate`."""
    socket.zap_domain = BULK_DOMAIN
    socket.plain_server = True


class Gate:
    """Answers libzmq's question whether a client may connect: only with the job's key.

    At the bulk port `admits(user, password)` decides.
    """

    def __init__(self, context: zmq.Context, keys: Keys, admits: Callable[[bytes, bytes], bool] | None = None) -> None:
        self._admits = admits
        self._mechanism = b"CURVE" if keys.encrypts else b"PLAIN"
        self._admitted = z85.decode(keys.public) if keys.encrypts else keys.public.encode() + keys.secret.encode()
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP)
        self.refused = 0

    def answer_all(self) -> None:
        """Answers the questions that have arrived."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._answer(self.socket.recv_multipart(zmq.NOBLOCK))

    def _answer(self, question: list[bytes]) -> None:
        version, request_id, domain, mechanism = question[0], question[1], question[2], question[5]
        given = question[6:]  # a public key whose secret key was proven, or a name and a password
        if domain == BULK_DOMAIN:
            admitted = self._admits is not None and mechanism == b"PLAIN" and len(given) == 2 and self._admits(*given)
        else:
            admitted = mechanism == self._mechanism and hmac.compare_digest(b"".join(given), self._admitted)
        self.refused += not admitted
        code, text = (b"200", b"OK") if admitted else (b"400", b"not a key of this job")
        self.socket.send_multipart([version, request_id, code, text, b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)
