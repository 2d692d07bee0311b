"""The page's arithmetic is that of `trace.amdahl`, on seeds and on random figures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from dlite_agent.trace.amdahl import Amdahl, Equivalent, analyse, bound, decode_speedup, share_before, workflow_speedup
from dlite_agent.trace.phases import PHASES

RUN = """async ([name, cases]) => {
  const module = await import(new URL('amdahl.js', document.baseURI).href);
  return cases.map((args) => module[name](...args));
}"""


@pytest.fixture
def run(view: Callable[..., Page]) -> Callable[[str, list[Any]], list[Any]]:
    """Calls a function of amdahl.js with many arguments."""
    page = view()
    return lambda name, cases: list(page.evaluate(RUN, [name, cases]))


def same(found: Any, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-12, abs_tol=1e-15) or found == expected


def test_the_seed_figures(run: Callable[..., list[Any]]) -> None:
    assert run("workflowSpeedup", [[0.3, 3]])[0] == pytest.approx(1.25)
    assert run("decodeSpeedup", [[0.010, 4, 0.020]])[0] == pytest.approx(2.0)
    assert run("bound", [[0.41]])[0] == pytest.approx(1.69, abs=0.01)
    assert run("bound", [[1]])[0] == math.inf


def test_random_figures_agree_with_the_report(run: Callable[..., list[Any]]) -> None:
    rng = random.Random(4)
    pairs = [[rng.random(), rng.uniform(0.2, 40)] for _ in range(60)]
    for name, function in (("workflowSpeedup", workflow_speedup), ("shareBefore", share_before)):
        assert all(same(found, function(*pair)) for found, pair in zip(run(name, pairs), pairs, strict=True))
    assert all(
        same(found, bound(f)) for found, (f, _) in zip(run("bound", [[f] for f, _ in pairs]), pairs, strict=True)
    )
    triples = [[rng.random(), rng.uniform(1, 8), rng.uniform(0.01, 0.5)] for _ in range(30)]
    found = run("decodeSpeedup", triples)
    assert all(same(value, decode_speedup(*triple)) for value, triple in zip(found, triples, strict=True))


def test_random_timelines_agree_with_the_report(run: Callable[..., list[Any]]) -> None:
    rng = random.Random(5)
    cases = []
    for i in range(40):
        seconds = {phase: rng.choice((0.0, rng.uniform(0, 30))) for phase in PHASES}
        if i == 0:
            seconds = dict.fromkeys(PHASES, 0.0)
        if i == 1:
            seconds = dict.fromkeys(PHASES, 0.0) | {"decode": 3.0}
        ar = {"seconds": rng.choice((0.0, rng.uniform(0, 90))), "error": rng.uniform(0, 3)}
        cases.append([seconds, ar])
    for found, (seconds, ar) in zip(run("analyse", cases), cases, strict=True):
        expected = analyse(seconds, Equivalent(**ar, tokens=1, extrapolated=0.0))
        compare(found, expected)


def compare(found: dict[str, Any], expected: Amdahl) -> None:
    for name in ("decode", "rest", "decode_share", "bound_from_here"):
        assert same(found[name], getattr(expected, name)), name
    for name in ("f", "s_d", "workflow", "bound"):
        estimate = getattr(expected, name)
        if estimate is None:
            assert found[name] is None
        else:
            assert all(same(a, b) for a, b in zip(found[name], estimate, strict=True)), name
