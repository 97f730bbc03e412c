"""Where work goes: always to hosts that can hold it, free ones first, and an error that shows every host when there is none."""

from __future__ import annotations

import random

import pytest

from gpulayer.errors import PlacementError
from gpulayer.resources import Device, Host, Resources
from gpulayer.scheduler.cluster import Cluster, HostView
from gpulayer.scheduler.placement import Placement, place, place_gang


def view(name: str, cpus: float = 4, gpus: int = 0, *, free: tuple[float, float] | None = None, waiting: int = 0) -> HostView:
    devices = (*(Device("cuda", index, "GPU") for index in range(gpus)), Device("cpu", 0, "CPU"))
    host = Host(name.encode().ljust(8), name, f"10.0.0.{len(name)}:7770", cpus, 1 << 30, devices)
    cpus_free, gpus_free = (cpus, gpus) if free is None else free
    return HostView(host, cpus_free, gpus_free, waiting)


def cluster(*views: HostView) -> Cluster:
    return Cluster(views)


def names(placement: Placement) -> list[str]:
    return [host.name for host in placement.hosts]


# --- one worker


def test_worker_goes_where_there_is_room() -> None:
    found = place(Resources(2), cluster(view("a", free=(1, 0)), view("b", free=(2, 0))))
    assert (names(found), found.reason) == (["b"], "it has room now")


def test_worker_goes_where_most_is_free() -> None:
    assert names(place(Resources(1), cluster(view("a", 4), view("b", 16), view("c", 8)))) == ["b"]


def test_worker_goes_to_the_shortest_queue_when_all_are_busy() -> None:
    busy = cluster(view("a", free=(0, 0), waiting=3), view("b", free=(0, 0), waiting=1), view("c", free=(0, 0), waiting=2))
    found = place(Resources(1), busy)
    assert (names(found), found.reason) == (["b"], "its queue is the shortest")


def test_worker_without_gpus_leaves_gpu_hosts_free() -> None:
    both = cluster(view("gpus", 64, 8), view("cpus", 2))
    assert names(place(Resources(1), both)) == ["cpus"]
    assert names(place(Resources(1, 1), both)) == ["gpus"]
    assert names(place(Resources(4), both)) == ["gpus"]


def test_worker_goes_to_the_first_of_equal_hosts() -> None:
    assert names(place(Resources(1), cluster(view("b"), view("a"), view("c")))) == ["b"]


@pytest.mark.parametrize("wanted", ["b", "10.0.0.1:7770", "10.0.0.1"])
def test_worker_goes_to_the_host_that_was_named(wanted: str) -> None:
    two = cluster(view("longer"), view("b", free=(0, 0)))
    assert names(place(Resources(1), two, host=wanted)) == ["b"]


def test_unknown_host_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlacementError, match="host='c' is not connected; connected hosts: a, b"):
        place(Resources(1), cluster(view("a"), view("b")), host="c")
    with pytest.raises(PlacementError, match=r"connected hosts: \(none\)"):
        place_gang(1, Resources(1), cluster(), host="c")


def test_worker_that_no_host_can_hold_is_refused_with_every_host() -> None:
    with pytest.raises(PlacementError) as caught:
        place(Resources(2, 4), cluster(view("a", 8), view("b", 16, 2, free=(3, 0.5))))
    assert str(caught.value).splitlines() == [
        "no host can hold a worker with 2 CPU and 4 GPU; the hosts are:",
        "  a: 8 CPU (8 free), 0 GPU",
        "  b: 16 CPU (3 free), 2 GPU (0.5 free)",
    ]


def test_worker_that_the_named_host_cannot_hold_is_refused_although_another_could() -> None:
    with pytest.raises(PlacementError, match="no host can hold a worker with 1 CPU and 1 GPU on 'a'"):
        place(Resources(1, 1), cluster(view("a"), view("b", 4, 1)), host="a")


def test_empty_cluster_holds_nothing() -> None:
    with pytest.raises(PlacementError, match="no host can hold"):
        place(Resources(0), cluster())


# --- a gang


def test_gang_takes_hosts_in_the_order_given() -> None:
    found = place_gang(2, Resources(1), cluster(view("c"), view("a"), view("b")))
    assert names(found) == ["c", "a"]


def test_gang_takes_free_hosts_first_and_still_ranks_them_in_order() -> None:
    some = cluster(view("a", free=(0, 0)), view("b"), view("c", free=(0, 0)), view("d"))
    assert names(place_gang(2, Resources(1), some)) == ["b", "d"]
    assert names(place_gang(3, Resources(1), some)) == ["a", "b", "d"]


def test_gang_skips_hosts_that_cannot_hold_a_share() -> None:
    some = cluster(view("a", 1), view("b", 4, 2), view("c", 4, 1), view("d", 4, 2))
    assert names(place_gang(2, Resources(2, 2), some)) == ["b", "d"]


def test_gang_that_does_not_fit_is_refused_with_every_host_and_what_to_do() -> None:
    with pytest.raises(PlacementError) as caught:
        place_gang(3, Resources(1, 1), cluster(view("a", 4, 1), view("b", 4, 0)))
    first, *rows = str(caught.value).splitlines()
    assert "the run needs 3 host(s) with 1 CPU and 1 GPU each; 1 of 2 connected host(s) can hold that" in first
    assert "connect(local=3)" in first
    assert rows == ["  a: 4 CPU (4 free), 1 GPU (1 free)", "  b: 4 CPU (4 free), 0 GPU"]


def test_gang_on_a_named_host_has_one_node() -> None:
    two = cluster(view("a"), view("b"))
    assert names(place_gang(1, Resources(1), two, host="b")) == ["b"]
    with pytest.raises(PlacementError, match="1 of 1 connected"):
        place_gang(2, Resources(1), two, host="b")


# --- whatever the cluster


def any_cluster(rng: random.Random) -> Cluster:
    views = []
    for number in range(rng.randint(0, 8)):
        cpus, gpus = rng.choice([1, 2, 4, 64]), rng.choice([0, 0, 1, 2, 8])
        free = (rng.uniform(-1, cpus), rng.choice([0, gpus, rng.uniform(0, gpus)]))
        views.append(view(f"host{number}", cpus, gpus, free=free, waiting=rng.randint(0, 3)))
    return Cluster(tuple(views))


def can_hold(one: HostView, need: Resources) -> bool:
    return need.cpus <= one.host.cpus and need.gpus <= len(one.host.gpus)


def has_room(one: HostView, need: Resources) -> bool:
    return need.cpus <= one.cpus_free and need.gpus <= one.gpus_free


def any_need(rng: random.Random) -> Resources:
    return Resources(rng.choice([0, 0.5, 1, 2, 8]), rng.choice([0, 0, 0.5, 1, 2]))


@pytest.mark.parametrize("seed", range(10))
def test_worker_is_placed_well_in_any_cluster(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        some, need = any_cluster(rng), any_need(rng)
        able = [one for one in some.views if can_hold(one, need)]
        if not able:
            with pytest.raises(PlacementError) as caught:
                place(need, some)
            assert [row[0] for row in caught.value.rejected] == [one.host.name for one in some.views]
            continue
        (host,) = place(need, some).hosts
        chosen = next(one for one in some.views if one.host is host)
        assert chosen in able
        if any(has_room(one, need) for one in able):
            assert has_room(chosen, need)
        else:
            assert chosen.waiting == min(one.waiting for one in able)
        assert place(need, some).hosts == (host,)


@pytest.mark.parametrize("seed", range(10))
def test_gang_is_placed_well_in_any_cluster(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        some, need, nodes = any_cluster(rng), any_need(rng), rng.randint(1, 5)
        able = [one for one in some.views if can_hold(one, need)]
        if len(able) < nodes:
            with pytest.raises(PlacementError):
                place_gang(nodes, need, some)
            continue
        hosts = place_gang(nodes, need, some).hosts
        chosen = [one for one in some.views if one.host in hosts]
        assert [one.host for one in chosen] == list(hosts)  # each once, in the order of the cluster
        assert len(chosen) == nodes
        assert all(can_hold(one, need) for one in chosen)
        free = [one for one in able if has_room(one, need)]
        assert sum(has_room(one, need) for one in chosen) == min(nodes, len(free))
