"""Decides, at each CURVE handshake of this process's sockets, whether the other side may connect."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85

from gpulayer.errors import GPUlayerError
from gpulayer.wire.channel import Lane
from gpulayer.wire.context import context, is_current
from gpulayer.wire.keys import AllowList

ZAP_DOMAIN = b"gpulayer"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"

_log = logging.getLogger("gpulayer.security")


class Authenticator:
    """Answers, in this process's context, whether the holder of a key may connect (ZeroMQ RFC 27).

    Belongs to one loop; all methods are for that loop's thread. While it is not running, nobody new gets in.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, allow_list: AllowList) -> None:
        self._loop = loop
        self._allow_list = allow_list
        self._context: zmq.Context[Any] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._lane: Lane | None = None

    @property
    def running(self) -> bool:
        """Whether it answers for sockets of this process."""
        return self._lane is not None and not self._loop.is_closed() and is_current(self._context)

    def start(self) -> None:
        """Start to answer. Raises `GPUlayerError` if another one does so already."""
        if self.running:
            return
        self._context = context()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        try:
            socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            socket.close()
            raise GPUlayerError(f"this process has an authenticator already ({error.strerror})") from None
        self._socket = socket
        self._lane = Lane(socket, self._loop, self._answer)

    def stop(self) -> None:
        """Answer no more: from now on every handshake is refused. Connections that are open stay."""
        lane, self._lane = self._lane, None
        if lane is not None and self._socket is not None:
            with suppress(zmq.ZMQError):  # the context may be gone
                self._socket.unbind(ZAP_ENDPOINT)  # at once; closing alone would free the name some time later
            lane.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        request = [frame.bytes for frame in frames]
        if self._lane is None or len(request) < 4 or request[1] != b"":
            _log.warning("a malformed question to the authenticator is ignored")
            return
        try:
            user = self._decide(request[2:])
        except Exception:  # noqa: BLE001 - whatever goes wrong here, the answer is no, and the next question is answered
            _log.exception("the authenticator failed, so it refuses")
            user = None
        status = [b"200", b"OK", user, b""] if user else [b"400", b"refused", b"", b""]
        self._lane.send([request[0], b"", b"1.0", request[3], *status])

    def _decide(self, question: list[bytes]) -> bytes | None:
        """The user id to let in, None to refuse. `question`: version, id, domain, address, routing id, mechanism, key."""
        public, address = "", "?"
        if len(question) == 7:
            address = question[3].decode("ascii", "replace")
            if question[0] == b"1.0" and question[2] == ZAP_DOMAIN and question[5] == b"CURVE" and len(question[6]) == 32:
                public = z85.encode(question[6]).decode()
                if self._allow_list.role(public) is not None:
                    return public.encode()
        what = f"unknown key {public[:8]}..." if public else "no CURVE key of ours to check"
        _log.warning("refused a connection from %s: %s", address, what)
        return None
