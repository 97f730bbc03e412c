"""The tree of errors: as it is drawn, with facts that are attributes, that pickle, and that cross the wire as plain values."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import msgpack
import pytest

from gpulayer import errors
from gpulayer.errors import (
    ActorDiedError,
    AuthError,
    GetTimeoutError,
    GPUlayerError,
    HostLostError,
    KeyFileError,
    MissingModuleError,
    PlacementError,
    RemoteError,
    RemoteTraceback,
    SerializationError,
    TrainingError,
    UsageError,
    VersionMismatchError,
    WorkerStartError,
    from_facts,
    to_facts,
)

TREE = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, GPUlayerError)]
FACTS = {
    "host": "gpu1",
    "rank": 3,
    "busy": True,
    "path": "config['model']",
    "rejected": [["gpu1", "1 CPU"], ["gpu2", "no GPU"]],
    "rows": [["python", "3.11", "3.12"]],
    "module": "PIL",
    "package": "pillow",
    "type_name": "mod.Odd",
    "text": "boom",
    "traceback": "line 1\nline 2",
    "name": "Counter",
    "pid": 17,
    "cause": "killed by SIGSEGV",
    "stderr": ["one", "two"],
    "message": "a fact may have any name",
    "blob": b"\0\xff",
    "none": None,
}

every_error = pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)


def drawn_tree() -> dict[str, tuple[str, list[str]]]:
    """Class name -> (its parent's name, builtin bases), as the docstring draws them."""
    found: dict[str, tuple[str, list[str]]] = {}
    trail: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ((?:\|   |    )*)\+-- (\w+)(?: \((\w+)\))?", line)
        if match:
            trail = trail[: 1 + len(match[1]) // 4]
            found[match[2]] = (trail[-1], [match[3]] if match[3] else [])
            trail.append(match[2])
        elif line == "    GPUlayerError":
            trail = ["GPUlayerError"]
    return found


def test_docstring_draws_the_real_tree() -> None:
    real = {cls.__name__: [base.__name__ for base in cls.__bases__] for cls in TREE if cls is not GPUlayerError}
    assert {name: [parent, *builtins] for name, (parent, builtins) in drawn_tree().items()} == real


def test_all_names_are_exported() -> None:
    public = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert set(errors.__all__) == {name for name in public if not name.startswith("_")}


@every_error
def test_error_keeps_its_facts_when_pickled(cls: type[GPUlayerError]) -> None:
    error = cls("what happened", **FACTS)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert (again.message, again.facts, str(again)) == ("what happened", FACTS, str(error))


@every_error
def test_error_keeps_its_facts_when_it_crosses_the_wire(cls: type[GPUlayerError]) -> None:
    error = cls("what happened", **FACTS)
    again = from_facts(msgpack.unpackb(msgpack.packb(to_facts(error))))
    assert type(again) is cls
    assert (again.message, again.facts, str(again)) == ("what happened", FACTS, str(error))


@every_error
def test_error_needs_no_facts(cls: type[GPUlayerError]) -> None:
    error = pickle.loads(pickle.dumps(cls()))
    assert type(error) is cls
    assert error.facts == {}
    assert isinstance(str(error), str)


@every_error
def test_facts_are_attributes(cls: type[GPUlayerError]) -> None:
    error = cls("text", host="gpu1", busy=True)
    assert (error.host, error.busy) == ("gpu1", True)
    assert not hasattr(error, "no_such_fact")
    with pytest.raises(AttributeError, match=f"{cls.__name__} has no attribute 'no_such_fact'"):
        _ = error.no_such_fact


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (UsageError, ValueError),
        (AuthError, ConnectionError),
        (HostLostError, ConnectionError),
        (SerializationError, TypeError),
        (MissingModuleError, ImportError),
        (GetTimeoutError, TimeoutError),
    ],
)
def test_error_is_caught_as_the_builtin_that_users_know(cls: type[GPUlayerError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="it says this"):
        raise cls("it says this", module="it says this")


@pytest.mark.parametrize("name", ["NoSuchError", "SystemExit", "RemoteTraceback", "annotations", "Any", "to_facts", None, 7])
def test_unknown_error_becomes_the_root(name: object) -> None:
    error = from_facts({"error": name, "message": "from a newer version", "facts": {"a": 1}})
    assert type(error) is GPUlayerError
    assert (str(error), error.a) == ("from a newer version", 1)


@pytest.mark.parametrize("body", [{}, {"facts": None}, {"facts": [1]}, {"facts": {1: 2, b"x": 3}}, {"message": None}])
def test_malformed_facts_still_make_an_error(body: dict[str, object]) -> None:
    assert type(from_facts({"error": "PlacementError", **body})) is PlacementError


def test_version_mismatch_shows_an_aligned_table() -> None:
    rows = [("python", "3.11", "3.12"), ("protocol", 1, 12)]
    assert str(VersionMismatchError("gpu1 does not fit", rows=rows)).splitlines() == [
        "gpu1 does not fit",
        "            here  there",
        "  python    3.11  3.12 ",
        "  protocol  1     12   ",
    ]


def test_placement_error_lists_each_host_with_its_reason() -> None:
    error = PlacementError("no room; the hosts are:", rejected=[("gpu1", "1 CPU"), ("gpu2", "0 GPU")])
    assert str(error) == "no room; the hosts are:\n  gpu1: 1 CPU\n  gpu2: 0 GPU"


def test_missing_module_names_package_host_and_command() -> None:
    text = str(MissingModuleError(module="PIL", package="pillow", host="gpu1"))
    assert text == "module 'PIL' is not installed on host 'gpu1'; on that host, type: pip install pillow"


def test_remote_error_shows_type_text_and_traceback() -> None:
    error = RemoteError(type_name="mod.Odd", text="boom", traceback="Traceback:\n  File x\n")
    assert str(error) == "mod.Odd: boom\n\nTraceback:\n  File x"


def test_actor_died_names_who_where_and_why() -> None:
    error = ActorDiedError(name="Counter", host="gpu1", pid=17, cause="exit code 3", stderr=["oh", "no"])
    assert str(error) == "Counter (pid 17 on gpu1) died: exit code 3\nlast lines of its stderr:\n  oh\n  no"
    assert str(ActorDiedError(name="C", host="h", pid=1, cause="x")) == "C (pid 1 on h) died: x"


def test_worker_start_error_shows_stderr_when_there_is_some() -> None:
    assert str(WorkerStartError("it ended", stderr=[])) == "it ended"
    assert str(WorkerStartError("it ended", stderr=["why"])) == "it ended\nlast lines of its stderr:\n  why"


def test_facts_do_not_hide_what_an_error_has_itself() -> None:
    error = KeyFileError("the text", message="a fact", path="/x")
    assert (error.message, error.facts["message"], error.path) == ("the text", "a fact", "/x")


def test_cause_is_kept_beside_the_facts() -> None:
    try:
        raise TrainingError("rank 1 failed", rank=1, host="gpu1") from KeyError("first")
    except TrainingError as error:
        assert isinstance(error.__cause__, KeyError)
        assert error.rank == 1


def test_remote_traceback_shows_its_text_and_pickles() -> None:
    again = pickle.loads(pickle.dumps(RemoteTraceback("Traceback:\n  File x\n")))
    assert str(again) == '\n"""\nTraceback:\n  File x\n"""'
    assert not isinstance(again, GPUlayerError)
