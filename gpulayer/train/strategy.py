"""Where a rank computes and how ranks meet: alone on one device, or together by torch.distributed.

strategy = SingleDevice(torch.device("cpu"))
strategy = Distributed.join(RankPlace(rank=0, world_size=2, ip="10.0.0.7"), store_address=("10.0.0.7", 41234))
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gpulayer.errors import UsageError
from gpulayer.train.precision import map_tensors

GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class RankPlace:
    """One rank of a gang: who it is, and the address at which the others reach its host."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    ip: str = "127.0.0.1"
    has_gpu: bool = False


class SingleDevice:
    """One device, in this process."""

    def __init__(self, device: torch.device, place: RankPlace | None = None) -> None:
        self.root_device = device
        self.place = place or RankPlace()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.place.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.place.rank

    def to_device(self, batch: Any) -> Any:
        """The batch on this rank's device; on the CPU the batch itself."""
        device = self.root_device
        if device.type == "cpu":
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))

    def wrap(self, step: nn.Module) -> nn.Module:
        """The module whose forward is a training step, made to exchange gradients where there is someone to exchange with."""
        return step

    def no_sync(self, step: nn.Module) -> AbstractContextManager[Any]:
        """Inside, backward leaves the gradients unexchanged."""
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank."""
        return [value]

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s value, on every rank."""
        return self.gather(value)[src]

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.gather(None)

    def reduce(self, tensor: torch.Tensor, reduce_op: str = "mean") -> torch.Tensor:
        """The mean or the sum of a tensor over the ranks."""
        if reduce_op not in ("mean", "sum"):
            raise UsageError(f"reduce_op={reduce_op!r} is not supported; allowed: 'mean', 'sum'")
        total = torch.stack([part.to(tensor.device) for part in self.gather(tensor.detach().cpu())]).sum(dim=0)
        return total / self.world_size if reduce_op == "mean" else total


class Distributed(SingleDevice):
    """One of several ranks, with a process group: NCCL between GPUs, Gloo between CPUs and for small values.

    The group ends with its process. Its end here could wait for ranks that have failed; and torch joins Gloo's thread with the
    GIL held, for which that thread may be waiting.
    """

    def __init__(self, device: torch.device, place: RankPlace, find_unused_parameters: bool = False) -> None:
        super().__init__(device, place)
        self._find_unused_parameters = find_unused_parameters

    @classmethod
    def join(cls, place: RankPlace, store_address: tuple[str, int], find_unused_parameters: bool = False) -> Distributed:
        """Meet the other ranks at rank 0's store and form the group."""
        interface = interface_of(place.ip)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        store = _opened.pop(store_address, None)
        if store is None:
            store = TCPStore(*store_address, is_master=False, timeout=GROUP_TIMEOUT)
        device = torch.device("cpu")
        if place.has_gpu and torch.cuda.is_available():
            device = torch.device("cuda", 0)  # the worker sees its own device only
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=GROUP_TIMEOUT)
        return cls(device, place, find_unused_parameters)

    def wrap(self, step: nn.Module) -> nn.Module:
        """See `SingleDevice.wrap`."""
        device_ids = [self.root_device] if self.root_device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(
            step, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=self._find_unused_parameters
        )

    def no_sync(self, step: nn.Module) -> AbstractContextManager[Any]:
        """See `SingleDevice.no_sync`."""
        assert isinstance(step, nn.parallel.DistributedDataParallel)
        return step.no_sync()

    def gather(self, value: Any) -> list[Any]:
        """See `SingleDevice.gather`."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone


_opened: dict[tuple[str, int], TCPStore] = {}  # the store lives in rank 0's process between `open_store` and `join`


def open_store(place: RankPlace) -> tuple[str, int] | None:
    """On rank 0: open the store at which the ranks meet, and return its address. None on the others."""
    if place.rank != 0:
        return None
    store = TCPStore(place.ip, 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
    address = (place.ip, store.port)
    _opened[address] = store
    return address


def interface_of(ip: str) -> str | None:
    """The network interface that has that address, None if no one has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return name
    return None
