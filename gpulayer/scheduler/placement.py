"""Where a worker or a gang goes: pure functions from a cluster and a need to a placement with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from gpulayer.errors import PlacementError
from gpulayer.resources import Host, Resources
from gpulayer.scheduler.cluster import Cluster, HostView


@dataclass(frozen=True, slots=True)
class Placement:
    """Hosts in rank order, and why these."""

    hosts: tuple[Host, ...]
    reason: str


def place(need: Resources, cluster: Cluster, *, host: str | None = None) -> Placement:
    """The host for one worker: one that has room now and most of it, else the one with the shortest queue.

    Raises `PlacementError` when no host could hold `need` even if nothing else ran.
    """
    views = _named(cluster, host)
    able = [view for view in views if _can_ever(view, need)]
    if not able:
        raise PlacementError(
            f"no host can hold a worker with {need}" + (f" on {host!r}" if host else "") + "; the hosts are:",
            rejected=[(view.host.name, _capacity(view)) for view in views],
        )
    order = {view.host.id: position for position, view in enumerate(cluster.views)}
    best = min(
        able,
        key=lambda view: (
            not _fits_now(view, need),
            view.waiting,
            view.gpus_free if need.gpus == 0 else 0.0,  # keep GPU hosts free for those who need GPUs
            -view.cpus_free,
            order[view.host.id],
        ),
    )
    return Placement((best.host,), "it has room now" if _fits_now(best, need) else "its queue is the shortest")


def place_gang(nodes: int, per_node: Resources, cluster: Cluster, *, host: str | None = None) -> Placement:
    """`nodes` different hosts in rank order, each with room for `per_node`: hosts that are free first, in the order given.

    Raises `PlacementError` when there are not so many.
    """
    views = _named(cluster, host)
    able = [view for view in views if _can_ever(view, per_node)]
    if len(able) < nodes:
        raise PlacementError(
            f"the run needs {nodes} host(s) with {per_node} each; {len(able)} of {len(views)} connected host(s) can hold that. "
            f"Connect more hosts (gpulayer.connect([...]), or connect(local={nodes}) to try it on this machine), "
            "or ask for less. The hosts are:",
            rejected=[(view.host.name, _capacity(view)) for view in views],
        )
    able.sort(key=lambda view: not _fits_now(view, per_node))  # stable: the order given holds among equals
    chosen = able[:nodes]
    positions = {view.host.id: position for position, view in enumerate(cluster.views)}
    chosen.sort(key=lambda view: positions[view.host.id])
    return Placement(tuple(view.host for view in chosen), "hosts with room, in the order given")


def _named(cluster: Cluster, name: str | None) -> list[HostView]:
    if name is None:
        return list(cluster.views)
    found = [view for view in cluster.views if name in (view.host.name, view.host.address, view.host.address.rpartition(":")[0])]
    if not found:
        names = ", ".join(view.host.name for view in cluster.views) or "(none)"
        raise PlacementError(f"host={name!r} is not connected; connected hosts: {names}")
    return found


def _can_ever(view: HostView, need: Resources) -> bool:
    return need.cpus <= view.host.cpus and need.gpus <= len(view.host.gpus)


def _fits_now(view: HostView, need: Resources) -> bool:
    return need.cpus <= view.cpus_free and need.gpus <= view.gpus_free


def _capacity(view: HostView) -> str:
    gpus = len(view.host.gpus)
    return f"{view.host.cpus:g} CPU ({view.cpus_free:g} free), {gpus} GPU" + (f" ({view.gpus_free:g} free)" if gpus else "")
