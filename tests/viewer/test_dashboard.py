"""The Grafana dashboard asks only for metrics that a server has, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.serving import Live
from tests.viewer.browser import headers, say

DASHBOARD = Path(__file__).parents[2] / "docker" / "grafana" / "dlite-agent.json"


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_served(server: Live) -> None:
    say(server, "Count.", "measured", max_tokens=3)
    text = server.get("/metrics", headers=headers()).text
    served = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        served |= {family.name + suffix for suffix in suffixes}
    asked = {name for expr in expressions() for name in re.findall(r"(?:vllm|dlite):[a-z0-9_]+", expr)}
    assert len(asked) > 20
    assert asked - served == set()


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert max(x for x, _ in own) < 24
        assert not own & cells, panel["title"]
        cells |= own
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_labels_that_are_grouped_by_exist(server: Live) -> None:
    say(server, "Count.", "labelled", max_tokens=3)
    text = server.get("/metrics", headers=headers()).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expr in expressions():
        for label, name in re.findall(r"sum by \((\w+)\) \(rate\(([a-z_:]+)\{", expr):
            if name in labels:
                assert label in labels[name], expr


def test_rounds_are_counted_by_few_sources(server: Live) -> None:
    """Whatever lengths a round's label tells in the trace: each value of a label is a series to keep."""
    for mode in ("ar", "suffix"):
        say(server, "Count.", f"rounds {mode}", max_tokens=60, dlite={"mode": mode})
    families = text_string_to_metric_families(server.get("/metrics", headers=headers()).text)
    found = {sample.labels["source"] for family in families for sample in family.samples if "source" in sample.labels}
    assert found >= {"none", "suffix"}
    assert found <= {"none", "dlite", "suffix", "none: no draft pays"}
