"""One raw ZeroMQ socket on an asyncio loop.

`zmq.asyncio` costs two to four times as much per message as the socket's file descriptor in `add_reader`. The
descriptor is edge-triggered: it says "look again", not "there is a message". So a lane drains the socket whenever it is
told to look, in bounded turns, and looks again after each send, because a send can swallow the edge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from gpulayer.wire.message import Buffer

TURN_MESSAGES = 256

Frame = zmq.Frame
Socket = zmq.Socket[bytes]
Frames = list[Frame]


class Lane:
    """A socket, its reader callback and its sends. Belongs to one loop; all methods are for that loop's thread."""

    def __init__(self, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, on_frames: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._loop = loop
        self._on_frames = on_frames
        self._fd: int = socket.getsockopt(zmq.FD)  # pyright: ignore[reportAttributeAccessIssue]
        self._look_planned = False
        self.closed = False
        loop.add_reader(self._fd, self._drain)
        self._plan_look()

    def send(self, frames: Sequence[Buffer | zmq.Frame], *, copy: bool = True) -> bool:
        """Queue one message; False if its addressee is unknown (a ROUTER's peer that has gone)."""
        if self.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again:  # a ROUTER whose peer's pipe is closing: for us the same as gone
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._plan_look()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading and close the socket; `linger_ms` is how long libzmq may still try to send."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _plan_look(self) -> None:
        if not self._look_planned and not self.closed:
            self._look_planned = True
            self._loop.call_soon(self._planned_look)

    def _planned_look(self) -> None:
        self._look_planned = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(TURN_MESSAGES):
            if self.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except BaseException:
                self._plan_look()  # there may be more, and the descriptor will not say so again
                raise
        self._plan_look()
