"""A run on several devices: the job goes to a gang of workers, events and trained weights come back.

with Gang.reserve(num_nodes=2, devices=1, accelerator="auto", name="fit") as gang:
    results = fit_in_gang(gang, job, reporter.handle)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpulayer.errors import UsageError
from gpulayer.resources import Host
from gpulayer.runtime.context import report
from gpulayer.runtime.gang import Gang, session_for_run
from gpulayer.train.checkpoint import to_bytes
from gpulayer.train.events import CheckpointReady, Event, MetricsLogged
from gpulayer.train.job import FitJob, RankResult
from gpulayer.train.loggers import RelayLogger
from gpulayer.train.loop import FitLoop
from gpulayer.train.portable import portable_state
from gpulayer.train.state import TrainerState
from gpulayer.train.strategy import Distributed, RankPlace, open_store

WORKER_MODULES = ("torch", "torch._dynamo", "gpulayer.train.gang")
"""What each rank needs and takes seconds to import: the first optimizer that a process makes imports torch._dynamo."""


def reserve(job: FitJob) -> Gang:
    """The workers that the job asks for, all or none. "auto" is what the hosts have, not what this machine has."""
    arguments = job.arguments
    nodes = arguments.num_nodes
    with session_for_run() as session:
        devices, accelerator = resolve(arguments.devices, arguments.accelerator, nodes, session.cluster().hosts)
        return Gang.reserve(num_nodes=nodes, devices=devices, accelerator=accelerator, name="fit", modules=WORKER_MODULES)


def resolve(devices: int | str, accelerator: str, num_nodes: int, hosts: Sequence[Host]) -> tuple[int, str]:
    """Devices of each host, and "gpu" or "cpu". "auto" means GPUs if any host has one: too few of them are an error later."""
    if accelerator == "mps":
        raise UsageError("accelerator='mps' with several devices is not supported yet; use accelerator='cpu'")
    wanted = devices if isinstance(devices, int) else 1
    counts = sorted((sum(gpu.kind != "metal" for gpu in host.gpus) for host in hosts), reverse=True)[:num_nodes]
    if accelerator == "cpu" or (accelerator == "auto" and not any(counts)):
        return wanted, "cpu"
    return (devices if isinstance(devices, int) else max(1, min(counts, default=1))), "gpu"


def fit_in_gang(gang: Gang, job: FitJob, handle: Callable[[Event], None]) -> list[RankResult]:
    """Run the job on every worker of the gang; the results in rank order. The first failing rank's error is raised."""
    places = [
        RankPlace(member.rank, member.local_rank, member.node_rank, len(gang.members), member.ip, bool(member.devices))
        for member in gang.members
    ]

    def on_event(rank: int, event: Event) -> None:
        handle(event)

    addresses = gang.run(open_store, [(place,) for place in places], on_event=on_event)
    return gang.run(rank_main, [(place, addresses[0]) for place in places], on_event=on_event, common=(job,))


def rank_main(job: FitJob, place: RankPlace, store_address: tuple[str, int]) -> RankResult:
    """What a worker runs: join the others and train."""
    unused = job.arguments.strategy == "ddp_find_unused_parameters_true"
    strategy = Distributed.join(place, store_address, find_unused_parameters=unused)
    trainer = TrainerState(job.arguments, job.callbacks, [], job.log_dir)
    trainer.loggers = [RelayLogger(job.log_dir, lambda row, step: _relay(trainer, row, step))]
    result = FitLoop(job, strategy, trainer, send).run()
    if place.rank != 0:
        return result
    return replace(result, callbacks=[portable_state(callback) for callback in trainer.callbacks])


def send(event: Event) -> None:
    """Report an event to the caller. A checkpoint goes as bytes: training must not change it on its way."""
    if isinstance(event, CheckpointReady) and not isinstance(event.content, bytes):
        event = CheckpointReady(event.path, to_bytes(event.content))
    report(event)


def _relay(trainer: TrainerState, row: dict[str, Any], step: int | None) -> None:
    if trainer.is_global_zero:
        send(MetricsLogged(trainer.global_step if step is None else step, row))
