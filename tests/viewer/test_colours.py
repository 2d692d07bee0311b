"""Contrast of the colours in tokens.css, in both themes, by the formula of WCAG 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlite_agent.api.viewer import PAGES
from dlite_agent.trace.phases import DECODE_PARTS, PHASES

TEXT = 4.5
GRAPHICS = 3.0
TOKENS = re.compile(r"--([a-z0-9-]+):\s*light-dark\(#([0-9a-f]{6})(?:[0-9a-f]{2})?,\s*#([0-9a-f]{6})(?:[0-9a-f]{2})?\)")
GROUNDS = ("page", "panel", "raised")
ON_GROUNDS = ("text", "muted", "accent", "bad")
ON_OWN = (("accent", "accent-soft"), ("good", "good-soft"), ("warn", "warn-soft"), ("bad", "bad-soft"))


def colours(theme: str) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name, light, dark in TOKENS.findall((PAGES / "tokens.css").read_text()):
        value = light if theme == "light" else dark
        found[name] = (int(value[:2], 16), int(value[2:4], 16), int(value[4:], 16))
    return found


def luminance(colour: tuple[int, int, int]) -> float:
    parts = [value / 255 for value in colour]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_formula_knows_black_and_white() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21.0)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_and_bars_can_be_seen(theme: str) -> None:
    known = colours(theme)
    wanted = [(name, ground, TEXT) for name in ON_GROUNDS for ground in GROUNDS]
    wanted += [(name, ground, TEXT) for name, ground in ON_OWN]
    wanted += [("text", "accent-soft", TEXT), ("muted", "accent-soft", TEXT), ("on-accent", "accent", TEXT)]
    wanted += [("panel", f"phase-{phase}", TEXT) for phase in ("tool", "restore")]  # words written on bars
    lanes = [f"phase-{phase}" for phase in PHASES] + [f"part-{part}" for part in DECODE_PARTS]
    wanted += [(name, ground, GRAPHICS) for name in lanes for ground in ("panel", "raised")]
    wanted += [(name, ground, GRAPHICS) for name in ("control-line", "focus") for ground in GROUNDS]
    low = [
        f"{name} on {ground}: {contrast(known[name], known[ground]):.2f}, wanted {least}"
        for name, ground, least in wanted
        if contrast(known[name], known[ground]) < least
    ]
    assert low == []


def test_no_other_file_of_the_page_has_colours_of_its_own() -> None:
    files = [path for path in Path(PAGES).iterdir() if path.suffix in (".css", ".js", ".html")]
    own = {
        path.name: found
        for path in files
        if path.name != "tokens.css" and (found := re.findall(r"#[0-9a-fA-F]{6}\b|rgba?\([^)]*\)", path.read_text()))
    }
    assert own == {}
