"""Where a step's time goes: laps of one clock, device events on CUDA, so that parts add up to the whole."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

Part = Literal["draft", "verify", "rest"]


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a step by part, and `wall`, taken by the host around the whole and never derived from the parts."""

    draft: float
    verify: float
    rest: float
    wall: float


class StepClock:
    """Stamps the beginning of each part; a part lasts until the next stamp. Reusable, one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[Part, float | torch.cuda.Event]] = []
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()
        self._stamps = []
        self.enter("rest")

    def enter(self, part: Part) -> None:
        self._stamps.append((part, self._now()))

    def stop(self) -> PartSeconds:
        end = self._now()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        seconds: dict[Part, float] = {"draft": 0.0, "verify": 0.0, "rest": 0.0}
        stamps = [*self._stamps, ("rest", end)]
        for (part, begin), (_, after) in pairwise(stamps):
            seconds[part] += _between(begin, after)
        return PartSeconds(seconds["draft"], seconds["verify"], seconds["rest"], time.perf_counter() - self._began)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
