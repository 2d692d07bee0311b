"""What a prefill and a transfer cost on this machine, from those that were made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dlite_agent.session.retention import Costs

_FORGET = 0.98
_SHARE = 0.3


@dataclass
class MeasuredCosts:
    """Costs that follow the latest measurements; `costs` holds starting values until there are some."""

    costs: Costs

    def __post_init__(self) -> None:
        self._products, self._sums = np.zeros((2, 2)), np.zeros(2)

    def prefill(self, tokens: int, context: int, seconds: float) -> None:
        """A chunk of tokens was prefilled behind `context` positions.

        Least squares for seconds = prefill_s * n + prefill_s2 * n², of which a chunk is a difference; old chunks count
        less and less.
        """
        row = np.array([tokens, tokens * (2 * context + tokens)], dtype=float)
        self._products = _FORGET * self._products + np.outer(row, row)
        self._sums = _FORGET * self._sums + row * seconds
        linear, square = self._sums[0] / self._products[0, 0], 0.0
        if np.linalg.matrix_rank(self._products) == 2:
            found = np.linalg.solve(self._products, self._sums)
            if (found >= 0).all():
                linear, square = found
        self.costs = replace(self.costs, prefill_s=float(linear), prefill_s2=float(square))

    def host(self, size: int, seconds: float) -> None:
        """Bytes went from host memory to the device."""
        self.costs = replace(self.costs, host_bytes_s=_mean(self.costs.host_bytes_s, size, seconds))

    def disk(self, size: int, seconds: float) -> None:
        """Bytes were read from a store and checked."""
        if self.costs.disk_bytes_s:
            self.costs = replace(self.costs, disk_bytes_s=_mean(self.costs.disk_bytes_s, size, seconds))


def _mean(rate: float, size: int, seconds: float) -> float:
    """A running mean of rates; transfers too small to tell one leave it as it was."""
    if size < 1 << 20 or seconds <= 0:
        return rate
    return (1 - _SHARE) * rate + _SHARE * size / seconds
