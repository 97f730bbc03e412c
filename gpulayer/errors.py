"""Every error that GPUlayer raises, in one tree.

    GPUlayerError
    +-- UsageError (ValueError)             an argument that cannot work; says what is allowed
    +-- NotConnectedError                   there is no session, or it has ended
    +-- ConnectError (ConnectionError)      a host could not be reached
    |   +-- AuthError                       it was reached, and one side does not know the other's key
    |   +-- VersionMismatchError            it was reached, and runs something that does not fit
    |   +-- HostLostError                   it was connected, and is gone
    +-- PlacementError                      no set of hosts can hold what was asked for
    +-- SerializationError (TypeError)      a value that cannot travel; names the variable
    +-- MissingModuleError (ModuleNotFoundError)  a package that the worker's host does not have
    +-- RemoteError                         user code failed, and its exception cannot be pickled
    +-- WorkerError
    |   +-- WorkerStartError                a worker process did not come up
    |   +-- ActorDiedError                  a worker process ended with calls pending
    +-- TaskCancelledError                  the call was cancelled
    +-- GetTimeoutError (TimeoutError)      `get` waited as long as it was told to
    +-- TrainingError                       a training run failed on some rank
    +-- KeyFileError                        a key file that is missing, readable by others, or not a key

Errors take facts, keep them as attributes, build their message from them, and pickle. Facts are plain values
(numbers, strings, lists, dicts), so that an error also crosses the wire without pickle: see `to_facts`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ActorDiedError",
    "AuthError",
    "ConnectError",
    "GPUlayerError",
    "GetTimeoutError",
    "HostLostError",
    "KeyFileError",
    "MissingModuleError",
    "NotConnectedError",
    "PlacementError",
    "RemoteError",
    "RemoteTraceback",
    "SerializationError",
    "TaskCancelledError",
    "TrainingError",
    "UsageError",
    "VersionMismatchError",
    "WorkerError",
    "WorkerStartError",
    "from_facts",
    "to_facts",
]


class GPUlayerError(Exception):
    """The root. Subclasses set `facts` (their constructor's keyword arguments) and override `describe`."""

    def __init__(self, message: str = "", /, **facts: Any) -> None:
        self.message = message
        self.facts: dict[str, Any] = facts
        super().__init__(self.describe())

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def describe(self) -> str:
        """The whole sentence a user reads: what was given, what is allowed, what to type next."""
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


def _rebuild(cls: type[GPUlayerError], message: str, facts: dict[str, Any]) -> GPUlayerError:
    return cls(message, **facts)


class UsageError(GPUlayerError, ValueError):
    """An argument that cannot work."""


class NotConnectedError(GPUlayerError):
    """There is no session, or the one that made this reference has ended."""


class ConnectError(GPUlayerError, ConnectionError):
    """A host could not be reached. Facts: `host` (as the caller wrote it)."""


class AuthError(ConnectError):
    """The host answered, and one side does not know the other's key."""


class VersionMismatchError(ConnectError):
    """The host answered, and runs something that does not fit. Facts: `rows`, a list of (what, ours, theirs)."""

    def describe(self) -> str:
        rows = [("", "here", "there"), *self.facts.get("rows", [])]
        widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
        table = "\n".join("  " + "  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
        return f"{self.message}\n{table}"


class HostLostError(ConnectError):
    """A connected host is gone; what it ran is lost."""


class PlacementError(GPUlayerError):
    """No set of hosts can hold what was asked for. Facts: `rejected`, a list of (host, reason)."""

    def describe(self) -> str:
        lines = [f"\n  {host}: {reason}" for host, reason in self.facts.get("rejected", [])]
        return self.message + "".join(lines)


class SerializationError(GPUlayerError, TypeError):
    """A value that cannot travel to another process. Facts: `path`, where in the value it was found."""


class MissingModuleError(GPUlayerError, ModuleNotFoundError):
    """A package that the driver has and the worker's host has not. Facts: `module`, `package`, `host`."""

    def describe(self) -> str:
        module, package, host = (self.facts.get(k, "?") for k in ("module", "package", "host"))
        return f"module {module!r} is not installed on host {host!r}; on that host, type: pip install {package}"


class RemoteError(GPUlayerError):
    """User code raised an exception that cannot be pickled. Facts: `type_name`, `text`, `traceback`."""

    def describe(self) -> str:
        name, text, trace = (self.facts.get(k, "") for k in ("type_name", "text", "traceback"))
        return f"{name}: {text}\n\n{trace}".rstrip()


class WorkerError(GPUlayerError):
    """A worker process failed, rather than the code in it."""


class WorkerStartError(WorkerError):
    """A worker process did not come up. Facts: `host`, `stderr` (its last lines)."""

    def describe(self) -> str:
        return _with_stderr(self.message, self.facts.get("stderr", []))


class ActorDiedError(WorkerError):
    """A worker process ended. Facts: `name`, `host`, `pid`, `cause` (exit code or signal), `stderr` (last lines)."""

    def describe(self) -> str:
        name, host, pid, cause = (self.facts.get(k, "?") for k in ("name", "host", "pid", "cause"))
        return _with_stderr(f"{name} (pid {pid} on {host}) died: {cause}", self.facts.get("stderr", []))


class TaskCancelledError(GPUlayerError):
    """The call was cancelled before it gave a result."""


class GetTimeoutError(GPUlayerError, TimeoutError):
    """`get` or `wait` waited as long as it was told to; the call goes on."""


class TrainingError(GPUlayerError):
    """A training run failed on some rank. Facts: `rank`, `host`; the rank's own exception is `__cause__`."""


class KeyFileError(GPUlayerError):
    """A key file that is missing, readable by others, a symlink, or not a key. Facts: `path`."""


class RemoteTraceback(Exception):  # noqa: N818 - shown as the cause of an error, never caught as one
    """Carries a remote traceback's text as the `__cause__` of the exception that came with it."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


def _with_stderr(sentence: str, lines: list[str]) -> str:
    if not lines:
        return sentence
    return sentence + "\nlast lines of its stderr:\n" + "\n".join(f"  {line}" for line in lines)


def to_facts(error: GPUlayerError) -> dict[str, Any]:
    """The error as plain values, for a msgpack header."""
    return {"error": type(error).__name__, "message": error.message, "facts": error.facts}


def from_facts(body: dict[str, Any]) -> GPUlayerError:
    """The inverse of `to_facts`; a name that is not in this tree becomes a plain `GPUlayerError`."""
    cls = globals().get(str(body.get("error")), GPUlayerError)
    if not (isinstance(cls, type) and issubclass(cls, GPUlayerError)):
        cls = GPUlayerError
    facts = body.get("facts")
    known = {str(name): value for name, value in facts.items()} if isinstance(facts, dict) else {}
    return cls(str(body.get("message", "")), **known)
