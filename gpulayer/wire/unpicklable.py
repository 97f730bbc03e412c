"""Why a value cannot be pickled: finds the variable to blame, so that the error can name it."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from gpulayer.errors import SerializationError

_SCALARS = frozenset({type(None), bool, int, float, str})
_MAX_DEPTH = 24
_MAX_PROBES = 5000
_FIELDS = {functools.partial: ("func", "args", "keywords"), types.MethodType: ("__self__", "__func__")}
_NOUNS = {types.FunctionType: "function", types.MethodType: "method"}
_ADVICE = "make it where it is used, or leave it out in `__getstate__`"


class DeviceTensorError(TypeError):
    """A tensor that sits in a device's memory."""

    def __init__(self, device: str) -> None:
        self.device = device
        super().__init__(f"it is a tensor on {device}; send `tensor.cpu()`, and move it with `.to(device)` where it arrives")


def explain_unpicklable(value: Any, error: BaseException, try_pickling: Callable[[Any], object]) -> SerializationError:
    """The error to raise when pickling `value` failed with `error`: names the variable that is to blame.

    `try_pickling` raises for a part that cannot be pickled.

    Facts: `path` (from the value to the variable), `type` (the variable's), and `device` if it is a GPU's tensor.
    """
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        message = f"cannot send {_describe(value)}: it is nested too deeply to be pickled; send it in a flatter form"
        return SerializationError(message, path=_name(value), type=_type_name(value))
    labels, culprit = _Search(try_pickling).find(value)
    facts = {"path": " -> ".join([_name(value), *labels]), "type": _type_name(culprit)}
    subject = f"its {' -> '.join(labels)} (type {facts['type']})" if labels else "it"
    why = f"cannot be pickled; {_ADVICE} ({type(error).__name__}: {error})"
    if isinstance(error, DeviceTensorError):
        why, facts["device"] = f"cannot travel: {error}", error.device
    return SerializationError(f"cannot send {_describe(value)}: {subject} {why:.400}", **facts)


class _Search:
    """Looks for the innermost part of a value that cannot be pickled: one that fails though all its parts pass."""

    def __init__(self, try_pickling: Callable[[Any], object]) -> None:
        self._try_pickling = try_pickling
        self._failed: dict[int, Any] = {}  # holds the objects, lest an id be used twice
        self._passed: dict[int, Any] = {}

    def find(self, value: Any) -> tuple[list[str], Any]:
        """(labels of the steps from `value`, the culprit); `value` itself where nothing inside it is to blame."""
        self._failed[id(value)] = value
        try:
            return self._descend(value, []) or ([], value)
        except Exception:  # noqa: BLE001 - a user's __repr__ or iterator may fail; the error to explain matters more
            return [], value

    def _descend(self, value: Any, labels: list[str]) -> tuple[list[str], Any] | None:
        innermost = True
        for label, part in _parts(value) if len(labels) < _MAX_DEPTH else ():
            known = id(part) in self._failed  # a way back to something outer
            if known or not self._passes(part):
                innermost = False
                self._failed[id(part)] = part
                found = None if known else self._descend(part, [*labels, label])
                if found:
                    return found
        return (labels, value) if innermost else None

    def _passes(self, part: Any) -> bool:
        if type(part) in _SCALARS or id(part) in self._passed or len(self._passed) + len(self._failed) > _MAX_PROBES:
            return True
        try:
            self._try_pickling(part)
        except Exception:  # noqa: BLE001 - a user's __reduce__ may raise anything, and that is the answer
            return False
        self._passed[id(part)] = part
        return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a pickle of `value` would hold, each with a label that a user understands."""
    kind = type(value)
    if kind is types.FunctionType:
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        hidden = ("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl")
        yield from ((f"class attribute {name!r}", part) for name, part in list(vars(value).items()) if name not in hidden)
        yield from ((f"base class {base.__name__!r}", base) for base in value.__bases__)
    elif kind in _FIELDS:
        yield from _attributes({name: getattr(value, name) for name in _FIELDS[kind]})
    elif kind is dict:
        yield from _parts_of_pairs(value.items())
    elif kind in (list, tuple, set, frozenset):
        yield from ((f"item {i}", part) for i, part in enumerate(list(value)))
    elif isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        yield from _attributes(vars(value))
    else:
        yield from _parts_of_instance(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(code):
        if name in function.__globals__:
            yield f"global variable {name!r}", function.__globals__[name]
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, default in [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
        yield f"default of argument {name!r}", default
    yield from _attributes(vars(function))
    yield from ((f"annotation of {name!r}", part) for name, part in function.__annotations__.items())


def _global_names(code: types.CodeType) -> dict[str, None]:
    """The globals that a function uses, inner functions included, in order."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return names


def _parts_of_instance(value: Any) -> Iterator[tuple[str, Any]]:
    reduce = cloudpickle.Pickler.dispatch_table.get(type(value))
    try:
        reduced: Any = reduce(value) if reduce else value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - then its own pickling code is what fails, and it has no parts to look at
        return
    padded: Any = (None, (), None, None, None) if isinstance(reduced, str) else (*reduced, None, None, None)
    constructor, args, state, items, pairs, *_ = padded
    yield "constructor", constructor
    for i, part in enumerate(args):
        yield ("class" if part is type(value) else f"constructor argument {i}"), part
    for part in state if type(state) is tuple and len(state) == 2 else (state,):  # (attributes, slots), or attributes
        yield from _attributes(part) if type(part) is dict else (("state", part),)
    yield from _parts(list(items or ()))
    yield from _parts_of_pairs(pairs or ())


def _attributes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"attribute {name!r}", part) for name, part in list(values.items()))


def _parts_of_pairs(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, part in list(pairs):
        yield f"key {key!r:.60}", part
        yield f"key {key!r:.60} itself", key


def _type_name(value: Any) -> str:
    kind: Any = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _name(value: Any) -> str:
    return value.__name__ if _noun(value) else _type_name(value)


def _noun(value: Any) -> str | None:
    """What to call a value that has a name of its own."""
    return "class" if isinstance(value, type) else _NOUNS.get(type(value))


def _describe(value: Any) -> str:
    noun = _noun(value)
    return f"{noun} {value.__name__!r}" if noun else f"a value of type {_type_name(value)}"
