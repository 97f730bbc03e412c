"""Arguments that are not ours: known to Lightning and not supported yet, or unknown. Nothing is accepted and ignored.

    refuse_others("log", others, known=("name", "value"), not_yet={"enable_graph": (False,)})

Of what Lightning knows and we do not do, only the values that ask for nothing are let through.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gpulayer.errors import UsageError

NotYet = Mapping[str, tuple[Any, ...]]
"""Arguments of Lightning's that are not supported yet, with the values that ask for nothing."""


def refuse_others(
    place: str, given: Mapping[str, Any], known: Iterable[str], not_yet: NotYet, instead: Mapping[str, str] | None = None
) -> None:
    """Raise `UsageError` for the first of `given` that asks for something; `instead` says what to do in place of some."""
    for name, value in given.items():
        if name in not_yet:
            if not any(value is idle or (type(value) is type(idle) and value == idle) for idle in not_yet[name]):
                raise UsageError(f"{place}({name}={value!r}): Lightning has this argument, GPUlayer does not support it yet")
            continue
        if instead and name in instead:
            raise UsageError(f"{place} has no argument {name!r}; {instead[name]}")
        ours = sorted(known)
        close = difflib.get_close_matches(name, [*ours, *not_yet], n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(ours)}"
        raise UsageError(f"{place} has no argument {name!r}; {hint}")
