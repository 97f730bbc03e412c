"""Agents and workers find GPUlayer; user code sees the environment that the user set."""

import os

import pytest

import gpulayer
from gpulayer.runtime import launch


@pytest.mark.parametrize(
    "given", [{}, {"PYTHONPATH": "/a:/b"}, {"PYTHONSAFEPATH": ""}, {"PYTHONPATH": "/a", "PYTHONSAFEPATH": "1"}]
)
def test_restore_undoes_own_paths(given: dict[str, str]) -> None:
    changed = launch.own_paths({"HOME": "/h", **given})
    assert changed["PYTHONPATH"].endswith(given.get("PYTHONPATH", ""))
    assert changed["PYTHONSAFEPATH"] == "1"
    launch.restore(changed)
    assert changed == {"HOME": "/h", **given}


def test_worker_has_the_users_python_variables(own_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")

    @gpulayer.remote
    def look() -> tuple[str | None, str | None]:
        return os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH")

    with gpulayer.connect():
        assert gpulayer.get(look.remote()) == ("/somewhere/else", None)
