"""The environment in which agents and workers start: they find this very GPUlayer, and user code in a worker notices nothing.

Python takes its search path from PYTHONPATH when it starts. An agent and its zygote need ours; what the user had set is
kept aside, and put back in each worker before user code runs, since that may start programs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from os import pathsep
from pathlib import Path

_OWN = {"PYTHONPATH": "_GPULAYER_PYTHONPATH", "PYTHONSAFEPATH": "_GPULAYER_PYTHONSAFEPATH"}


def own_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` in which Python finds this GPUlayer first, and nothing in the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    aside = {kept: environment[name] for name, kept in _OWN.items() if name in environment}
    path = pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    return {**environment, **aside, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def restore(environment: MutableMapping[str, str]) -> None:
    """Undo `own_paths`."""
    for name, kept in _OWN.items():
        environment.pop(name, None)
        if kept in environment:
            environment[name] = environment.pop(kept)
