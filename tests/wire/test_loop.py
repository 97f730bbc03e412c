"""The loop: uvloop where it is installed, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gpulayer.wire.loop import new_loop


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_new_loop_is_uvloops() -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = new_loop()
    assert isinstance(loop, uvloop.Loop)
    assert not loop.is_running()
    assert loop.run_until_complete(answer()) == 42
    loop.close()


def test_new_loop_is_asyncios_when_uvloop_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_loop()
    assert type(loop).__module__.startswith("asyncio")
    assert loop.run_until_complete(answer()) == 42
    loop.close()


def test_each_new_loop_is_another() -> None:
    one, two = new_loop(), new_loop()
    assert one is not two
    one.close()
    assert not two.is_closed()
    two.close()
