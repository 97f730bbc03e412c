"""Sites, endpoints and a loop for the tests of the wire."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.resources import Address, new_id
from gpulayer.wire.hello import make_hello
from gpulayer.wire.loop import new_loop
from gpulayer.wire.message import Message
from gpulayer.wire.rpc import Endpoint
from tests.wire.office import Office
from tests.wire.site import Runner, Site, wait_until


@pytest.fixture
def run() -> Iterator[Runner]:
    """See `Runner`."""
    runner = Runner(new_loop())
    yield runner
    runner.close()


@pytest.fixture
def office() -> Iterator[Office]:
    """See `Office`; what its loop reports as wrong fails the test, unless it is taken from `problems`."""
    office = Office()
    yield office
    office.loop.close()
    assert office.problems == []


@pytest.fixture
def make_site(run: Runner, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Make a `Site` that is not listening yet."""
    made: list[Site] = []

    def make(name: str = "gpu1") -> Site:
        made.append(Site(run.loop, tmp_path / "home", name))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.fixture
def make_endpoint(run: Runner) -> Iterator[Callable[..., Endpoint]]:
    """Make an `Endpoint` whose messages go to `endpoint.inbox`, connected to the sites given."""
    made: list[Endpoint] = []

    async def make(*sites: Site, on_message: Callable[[Address, Message], None] | None = None) -> Endpoint:
        inbox: list[tuple[Address, Message]] = []
        endpoint = Endpoint(run.loop, new_id(), on_message or (lambda source, message: inbox.append((source, message))))
        endpoint.inbox = inbox  # type: ignore[attr-defined]
        made.append(endpoint)
        for site in sites:
            await endpoint.connect(site.dial, make_hello("driver"), 5.0)
        return endpoint

    yield make
    for endpoint in made:
        run(endpoint.close(0))


@pytest.fixture
def until() -> Callable[..., Coroutine[Any, Any, None]]:
    """`await until(lambda: ...)`: let the loop run until something holds."""
    return wait_until
