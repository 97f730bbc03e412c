"""Requests and answers over real sockets: connecting, what arrives, and in which order."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from gpulayer.errors import ConnectError, PlacementError, UsageError, VersionMismatchError
from gpulayer.resources import Address, Host
from gpulayer.wire.courier import WINDOW_BYTES
from gpulayer.wire.hello import make_hello
from gpulayer.wire.message import MESSAGE_BYTES, Kind, Message, chunk_header, pack
from gpulayer.wire.rpc import BULK, Endpoint
from tests.wire.site import address_at, echo, listen, note, over_both

# --- connecting


@over_both
def test_connect_gives_the_host_and_a_channel(run, make_site, make_endpoint, own_folders, how: str) -> None:
    async def test() -> None:
        site = listen(make_site("gpu7"), how, own_folders)
        endpoint = await make_endpoint()
        host = await endpoint.connect(site.dial, make_hello("driver", torch="2.4"), 5.0)
        assert (host.id, host.name) == (site.id, "gpu7")
        assert site.hellos[0]["torch"] == "2.4"
        assert endpoint.home == site.address
        assert list(endpoint.channels) == [site.id]
        assert endpoint.channels[site.id].host == host
        assert endpoint.channels[site.id].reached_at == "127.0.0.1"

    run(test())


def test_home_is_the_first_agent(run, make_site, make_endpoint, own_folders) -> None:
    async def test() -> None:
        endpoint = await make_endpoint()
        with pytest.raises(ConnectError, match="not connected to any agent"):
            _ = endpoint.home
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        for site in (one, two):
            await endpoint.connect(site.dial, make_hello("driver"), 5.0)
        assert endpoint.home == one.address

    run(test())


@pytest.mark.parametrize(
    ("endpoint", "address"), [("tcp://gpu1:80", "gpu1"), ("tcp://[::1]:80", "::1"), ("tcp://10.0.0.7:7770", "10.0.0.7")]
)
def test_reached_at_is_the_address_without_port(run, make_site, make_endpoint, endpoint: str, address: str) -> None:
    async def test() -> str:
        site = make_site().listen_tcp()
        channel = (await make_endpoint(site)).channels[site.id]
        channel.dial = replace(channel.dial, endpoint=endpoint)
        return channel.reached_at

    assert run(test()) == address


def test_failed_connect_leaves_the_others_alone(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        one, two, three = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two", "three"))
        two.greeting, two.rows = Kind.REFUSED, [["protocol", "1", "2"]]
        endpoint = await make_endpoint(one)
        with pytest.raises(VersionMismatchError):
            await endpoint.connect(two.dial, make_hello("driver"), 5.0)
        endpoint.tell(one.address, "still there")
        await until(lambda: one.asked)
        await endpoint.connect(three.dial, make_hello("driver"), 5.0)
        assert list(endpoint.channels) == [one.id, three.id]

    run(test())


def test_cancelled_connect_leaves_nothing(run, make_site, make_endpoint, own_folders) -> None:
    async def test() -> None:
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        one.greeting = None
        endpoint = await make_endpoint()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(endpoint.connect(one.dial, make_hello("driver"), 60.0), 0.2)
        assert endpoint.channels == {}
        assert (await endpoint.connect(two.dial, make_hello("driver"), 5.0)).id == two.id

    run(test())


def test_messages_for_others_do_not_go_to_the_agent_being_dialled(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        two.greeting = None
        endpoint, other = await make_endpoint(one), await make_endpoint(one)
        dialling = asyncio.ensure_future(endpoint.connect(two.dial, make_hello("driver"), 5.0))
        await until(lambda: two.hellos)
        endpoint.tell(Address(b"far away", other.peer), "relayed")  # the first agent relays it
        await until(lambda: other.inbox)
        assert two.asked == []
        dialling.cancel()
        await asyncio.wait({dialling})

    run(test())


def test_greeting_of_another_agent_does_not_answer_a_dial(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("one", "two"))
        two.greeting = None
        endpoint = await make_endpoint(one)
        lost: list[str] = []
        endpoint.on_host_lost = lambda host, error: lost.append(host.name)
        dialling = asyncio.ensure_future(endpoint.connect(two.dial, make_hello("driver"), 5.0))
        await until(lambda: two.hellos)
        one.refuse(endpoint.peer)
        await until(lambda: lost)
        assert not dialling.done()
        host = Host(two.id, "two", "", 1.0, 1).to_plain()
        two.send(address_at(two, endpoint), Message(Kind.WELCOME, 0, {"host": host}))
        assert (await dialling).id == two.id
        two.send(address_at(two, endpoint), Message(Kind.WELCOME, 0, {"host": host}))  # once more, unasked
        two.send(address_at(two, endpoint), Message(Kind.TELL, 0, {"m": "after"}))
        await until(lambda: endpoint.inbox)
        assert lost == ["one"]

    run(test())


# --- asking and answering


@over_both
def test_ask_returns_the_answer(run, make_site, make_endpoint, own_folders, until, how: str) -> None:
    async def test() -> None:
        site = listen(make_site(), how, own_folders)
        endpoint = await make_endpoint(site)
        asking = asyncio.ensure_future(endpoint.ask(site.address, "state", depth=2))
        await until(lambda: site.asked)
        source, message = site.asked[0]
        assert source == address_at(site, endpoint)
        assert (message.kind, message.body) == (Kind.ASK, {"m": "state", "depth": 2})
        site.send(source, Message(Kind.REPLY, message.id, {"fine": True}))
        assert await asking == {"fine": True}

    run(test())


def test_ask_raises_what_the_other_side_raised(run, make_site, make_endpoint) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        asker, other = await make_endpoint(site), await make_endpoint(site)
        error = PlacementError("no room", rejected=[("a", "b")])
        other._on_message = lambda source, message: other.fail(source, message.id, error)
        with pytest.raises(PlacementError, match="no room") as caught:
            await asker.ask(address_at(site, other), "lease")
        assert caught.value.rejected == [["a", "b"]]

    run(test())


def test_answers_find_their_requests_in_any_order(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, other = await make_endpoint(site), await make_endpoint(site)
        asking = [asyncio.ensure_future(asker.ask(address_at(site, other), "double", n=n)) for n in range(500)]
        await until(lambda: len(other.inbox) == 500)
        assert [message.body["n"] for _, message in other.inbox] == list(range(500))
        random.Random(1).shuffle(other.inbox)
        for source, message in other.inbox:
            other.reply(source, message.id, {"n": 2 * message.body["n"]})
        assert [answer["n"] for answer in await asyncio.gather(*asking)] == [2 * n for n in range(500)]

    run(test())


def test_yields_come_before_their_reply_and_in_order(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, other = await make_endpoint(site), await make_endpoint(site)
        got: list[Message] = []
        asker.request(address_at(site, other), Kind.CALL, {}, (), note(got), note(got))
        asker.request(address_at(site, other), Kind.CALL, {}, (), note(got))  # one that wants no yields
        await until(lambda: len(other.inbox) == 2)
        for source, message in other.inbox:
            for number in range(3):
                other.reply(source, message.id, {"n": number}, [b"x" * 200_000 * (number == 1)], Kind.YIELD)
            other.reply(source, message.id, {})
        await until(lambda: len(got) == 5)
        assert [message.kind.name for message in got] == ["YIELD", "YIELD", "YIELD", "REPLY", "REPLY"]
        assert [len(message.frames[0]) for message in got[:3]] == [0, 200_000, 0]

    run(test())


def test_answers_that_nobody_waits_for_are_dropped(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site)
        got: list[Message] = []
        number = endpoint.request(site.address, Kind.ASK, {"m": "x"}, (), note(got))
        for kind in (Kind.REPLY, Kind.FAIL, Kind.REPLY, Kind.YIELD):
            for wrong in (0, number, number + 1, 2**60):
                site.send(address_at(site, endpoint), Message(kind, wrong, {}))
        site.send(address_at(site, endpoint), Message(Kind.TELL, 0, {"m": "after"}))
        await until(lambda: endpoint.inbox)
        assert [message.kind for message in got] == [Kind.REPLY]
        assert [message.kind for _, message in endpoint.inbox] == [Kind.TELL]

    run(test())


def test_ping_is_answered_and_gives_load_and_latency(run, make_site, make_endpoint, until) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        endpoint = await make_endpoint(site)
        channel = endpoint.channels[site.id]
        assert channel.latency_s is None
        before_s = channel.heard_s
        endpoint.ping_all()
        await until(lambda: channel.latency_s is not None)
        assert 0 < channel.latency_s < 5.0
        assert channel.heard_s > before_s
        assert channel.load["cpus_free"] == 3.0
        assert endpoint.inbox == []

    run(test())


def test_pong_of_somebody_else_is_no_sign_of_life(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        endpoint, other = await make_endpoint(site), await make_endpoint(site)
        other.tell(address_at(site, endpoint), "pong")
        await until(lambda: endpoint.inbox)
        assert endpoint.channels[site.id].latency_s is None

    run(test())


# --- payloads


@over_both
def test_payloads_arrive_whole_and_calls_in_order(run, make_site, make_endpoint, own_folders, until, how: str) -> None:
    async def test() -> None:
        site = listen(make_site(), how, own_folders)
        asker, other = await make_endpoint(site), await make_endpoint(site)
        rng = random.Random(5)
        sizes = [[], [0], [10, 0], [0, 3_000_000, 0, 5], [100_000], [64 * 1024], [64 * 1024 + 1], [1 << 20, 1 << 20], [7]]
        payloads = [[rng.randbytes(size) for size in row] for row in sizes]
        answers: list[Message] = []
        for number, payload in enumerate(payloads):
            asker.request(address_at(site, other), Kind.CALL, {"n": number}, payload, note(answers))
        await until(lambda: len(other.inbox) == len(payloads))
        assert [message.body["n"] for _, message in other.inbox] == list(range(len(payloads)))
        for source, message in other.inbox:
            other.reply(source, message.id, message.body, message.frames)
        await until(lambda: len(answers) == len(payloads))
        assert [[bytes(frame) for frame in message.frames] for message in answers] == payloads

    run(test())


@over_both
def test_window_bounds_what_is_on_the_way_and_nothing_else_waits(run, make_site, make_endpoint, own_folders, until, how) -> None:
    async def test() -> None:
        site = listen(make_site(), how, own_folders)
        asker, other = await make_endpoint(site), await make_endpoint(site)
        site.forwards_bulk = False
        data = [bytes([number]) * (9 << 20) for number in range(3)]
        answers: list[Message] = []
        for payload in data:
            asker.request(address_at(site, other), Kind.CALL, {}, [payload], note(answers))

        def held_bytes() -> int:
            return sum(len(frames[-1]) for frames in site.held_bulk)

        await until(lambda: held_bytes() == WINDOW_BYTES)
        answers_before_s = asker.channels[site.id].heard_s
        asker.ping_all()
        asker.tell(address_at(site, other), "overtakes")
        await until(lambda: other.inbox and asker.channels[site.id].heard_s > answers_before_s)
        assert [message.kind for _, message in other.inbox] == [Kind.TELL]
        assert held_bytes() == WINDOW_BYTES
        site.release_bulk()
        await until(lambda: len(other.inbox) == 4)
        assert [bytes(message.frames[0]) for _, message in other.inbox[1:]] == data

    run(test())


def test_request_too_large_for_a_frame_fails_and_the_connection_stays(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, other = await make_endpoint(site), await make_endpoint(site)
        with pytest.raises(UsageError, match="the request cannot be sent: a message of 3145"):
            await asker.ask(address_at(site, other), "x", text="y" * MESSAGE_BYTES)
        other._on_message = echo(other)
        assert await asker.ask(address_at(site, other), "x", text="y" * 2_000_000)

    run(test())


def test_answer_too_large_for_a_frame_fails_the_request(run, make_site, make_endpoint, own_folders) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, other = await make_endpoint(site), await make_endpoint(site)
        other._on_message = lambda source, message: other.reply(source, message.id, {"text": "y" * MESSAGE_BYTES})
        with pytest.raises(UsageError, match="the answer cannot be sent"):
            await asker.ask(address_at(site, other), "x")

    run(test())


def test_failure_with_a_huge_text_arrives_with_the_text_cut(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, other = await make_endpoint(site), await make_endpoint(site)
        answers: list[Message] = []
        asker.request(address_at(site, other), Kind.CALL, {}, (), note(answers))
        await until(lambda: other.inbox)
        source, message = other.inbox[0]
        body = {"error": "user", "text": "begin" + "y" * 5_000_000 + "end", "facts": {"lines": ["short", "z" * 5_000_000]}}
        other.reply(source, message.id, body, [b"the exception" * 10_000], Kind.FAIL)
        await until(lambda: answers)
        got = answers[0]
        assert (got.kind, bytes(got.frames[0]), got.body["error"]) == (Kind.FAIL, b"the exception" * 10_000, "user")
        assert got.body["text"].startswith("beginyyy")
        assert got.body["text"].endswith("yyyend")
        assert "characters left out" in got.body["text"]
        assert got.body["facts"]["lines"][0] == "short"
        assert len(got.body["facts"]["lines"][1]) < 70_000

    run(test())


# --- what a stranger may send


MALFORMED = [
    [b""],
    [b"short route"],
    [b"r" * 33, pack([])],
    [b"r" * 32],
    [b"r" * 32, b"\xc1"],
    [b"r" * 32, b""],
    [b"r" * 32, b"no chunk header", b"data"],
    [b"r" * 32, chunk_header(1, 0), b""],
    [b"r" * 32, b"a", b"b", b"c"],
]


def test_malformed_frames_are_reported_and_dropped(run, make_site, make_endpoint, until) -> None:
    async def test() -> None:
        site = make_site().listen_tcp()
        endpoint = await make_endpoint(site)
        await until(lambda: site.send_raw(endpoint.peer, b"first", lane=BULK))
        for frames in MALFORMED[1:]:
            assert site.send_raw(endpoint.peer, *frames, lane=BULK)
        for frames in MALFORMED:
            assert site.send_raw(endpoint.peer, *frames)
        site.send(address_at(site, endpoint), Message(Kind.TELL, 0, {"m": "after"}))
        await until(lambda: endpoint.inbox and len(run.problems) == 2 * len(MALFORMED))
        endpoint.ping_all()
        await until(lambda: endpoint.channels[site.id].latency_s is not None)

    run(test())
    assert all(problem.startswith("dropped a malformed frame") for problem in run.problems)
    run.problems.clear()


def test_message_that_the_process_cannot_take_does_not_stop_it(run, make_site, make_endpoint, own_folders, until) -> None:
    async def test() -> None:
        seen: list[str] = []

        def on_message(source: Address, message: Message) -> None:
            seen.append(message.body["m"])
            raise KeyError("nobody expects this")

        site = make_site().listen_ipc(own_folders / "run")
        endpoint = await make_endpoint(site, on_message=on_message)
        for name in ("one", "two", "three"):
            site.send(address_at(site, endpoint), Message(Kind.TELL, 0, {"m": name}))
        await until(lambda: len(seen) == 3)
        assert await answer_of(site, endpoint, until) == {"ok": 1}

    run(test())
    assert len(run.problems) == 3
    run.problems.clear()


async def answer_of(site: Any, endpoint: Endpoint, until: Any) -> dict[str, Any]:
    """What an endpoint gets for a question that the site answers."""
    asking = asyncio.ensure_future(endpoint.ask(site.address, "q"))
    await until(lambda: site.asked)
    source, message = site.asked.pop()
    site.send(source, Message(Kind.REPLY, message.id, {"ok": 1}))
    return await asking


# --- who may answer


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.FAIL, Kind.YIELD])
def test_answer_of_a_process_that_was_not_asked_is_dropped(
    run, make_site, make_endpoint, own_folders, until, kind, caplog
) -> None:
    async def test() -> None:
        site = make_site().listen_ipc(own_folders / "run")
        asker, asked, thief = [await make_endpoint(site) for _ in range(3)]
        answers: list[Message] = []
        number = asker.request(address_at(site, asked), Kind.CALL, {}, (), note(answers), note(answers))
        await until(lambda: asked.inbox)
        thief.reply(address_at(site, asker), number, {"stolen": True}, kind=kind)
        await until(lambda: "dropped a" in caplog.text)
        asked.reply(address_at(site, asker), number, {"true": True})
        await until(lambda: answers)
        assert [answer.body for answer in answers] == [{"true": True}]

    run(test())


def test_agent_of_another_host_cannot_answer_for_a_process(run, make_site, make_endpoint, own_folders, until, caplog) -> None:
    async def test() -> None:
        home, one, two = (make_site(name).listen_ipc(own_folders / "run") for name in ("home", "one", "two"))
        asker, asked = await make_endpoint(home, one, two), await make_endpoint(one)
        answers: list[Message] = []
        number = asker.request(address_at(one, asked), Kind.CALL, {}, (), note(answers))
        await until(lambda: asked.inbox)
        two.send(address_at(two, asker), Message(Kind.FAIL, number, {"error": "HostLostError"}))
        await until(lambda: "dropped a FAIL" in caplog.text)
        assert answers == []
        home.send(address_at(home, asker), Message(Kind.FAIL, number, {"error": "HostLostError"}))
        await until(lambda: answers)

    run(test())
