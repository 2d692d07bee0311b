"""Several processes of one run, as torch's launcher starts them: who this one is, its device, and sums over all.

Every process draws the same anchors and takes its share of them, so any number of processes follows one trajectory, up
to the order of sums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlite_agent.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process is number `rank` of `world` and works on `device`."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: str) -> Processes:
        """Join the run that torchrun's environment names; alone without one.

        Args:
            device: cpu, cuda, or auto for cuda where there is one. With several GPUs each process takes its own.

        Raises:
            InvalidRequest: the device is not there.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise InvalidRequest(f"device must be auto, cpu or cuda, not {device!r}", param="device")
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("no CUDA device was found: set device to cpu or auto", param="device")
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if "RANK" not in os.environ:
            return cls(torch.device("cuda" if cuda else "cpu"))
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if cuda else "gloo")
        return cls(place, dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add fp32 tensors over all processes, in place and in one exchange."""
        if self.world > 1:
            joined = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(joined)
            for tensor, part in zip(tensors, torch.split(joined, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor with the first process's."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def ask_first(self, value: T) -> T:
        """The first process's value, in every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def meet(self) -> None:
        """Wait until every process has come here: what the first one wrote before can then be read by all."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """End the group that `join` entered."""
        if self.world > 1:
            dist.destroy_process_group()
