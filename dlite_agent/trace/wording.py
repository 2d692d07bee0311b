"""How figures and untrusted text are worded, the same in tables and on pages."""

from __future__ import annotations

import math

from dlite_agent.trace.amdahl import Amdahl, RoundMeans
from dlite_agent.trace.summary import Spread


def printable(text: str) -> str:
    """Untrusted text without control characters, so that it cannot steer a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def times(value: float) -> str:
    """A speed-up as text."""
    return "no limit" if math.isinf(value) else f"{value:.2f}x"


def figures(amdahl: Amdahl | None, means: RoundMeans | None, ceiling: float | None) -> list[str]:
    """Lines with the speed-ups; none stands without the figures of its rounds."""
    lines = []
    if amdahl is not None:
        low_high = f"{times(amdahl.workflow.low)} to {times(amdahl.workflow.high)}"
        speed = f"S_D {times(amdahl.s_d.value)}" if amdahl.s_d is not None else "nothing decoded"
        lines.append(
            f"f {amdahl.f.value:.3f}, {speed}, workflow {times(amdahl.workflow.value)} ({low_high}), "
            f"bound {times(amdahl.bound.value)}; from here at most {times(amdahl.bound_from_here)}"
        )
    if means is not None:
        t_ar = amdahl.ar.t_ar if amdahl is not None else None
        error = amdahl.ar.error / amdahl.ar.tokens if amdahl is not None and amdahl.ar.tokens else 0.0
        lines.append(
            f"tau {means.tau:.2f}, T_AR {'not known' if t_ar is None else f'{t_ar * 1e3:.2f} ± {error * 1e3:.2f} ms'}, "
            f"T_D {means.t_d * 1e3:.2f} ms, T_V {means.t_v * 1e3:.2f} ms, T_S {means.t_s * 1e3:.2f} ms, "
            f"context {means.context:.0f}, batch {means.batch:.1f}, {means.rounds} rounds"
        )
        if amdahl is not None and amdahl.ar.extrapolated > 0:
            lines.append(f"{100 * amdahl.ar.extrapolated:.0f} % of the tokens lie outside the calibration of T_AR")
    if ceiling is not None:
        lines.append(f"bound at most {times(ceiling)} (all model time taken as decoding)")
    return lines


def spread_line(name: str, spread: Spread) -> str:
    """A spread over sessions as one line."""
    values = " / ".join("no limit" if math.isinf(v) else f"{v:.2f}" for v in (spread.p10, spread.p50, spread.p90))
    return f"{name} over {spread.n} sessions, 10 / 50 / 90 %: {values}"
