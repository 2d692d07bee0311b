"""Long sessions stay quick: 300 turns, 100,000 rounds. Costs are ratios to an empty page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, CDPSession, Page, expect

from tests.serving import Live
from tests.viewer.browser import frames, headers, upload
from tests.viewer.sample import agent_session, lines

BUDGET = 3.0
"""An interaction and the two frames that show it, against two frames of an empty page, which take 33 ms at 60 Hz: three
times that is 100 ms."""
SAME = 2.0
"""The same interaction at 300 turns and at 40, more than fit the screen: it must not cost more with every turn."""

ACTS = 5
ROUNDS = 4

MEASURE = """async () => {
  const act = (i) => { %s };
  const times = [];
  for (let i = 0; i < %d; i += 1) {
    const begun = performance.now();
    act(i);
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - begun);
  }
  return times;
}"""

PRESS = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
INTERACTIONS = {
    "select": PRESS % "j",
    "zoom": PRESS % "+",
    "zoom out": PRESS % "-",
    "fold": PRESS % "i",
    "theme": PRESS % "t",
    "scroll": "document.getElementById('turns').scrollTop = 900 * i",
    "pan": "document.querySelector('#times .plot').dispatchEvent(new WheelEvent('wheel', {deltaX: 60, bubbles: true}))",
    "slide": (
        "const s = document.getElementById('slider-sd'); s.value = 100 * i;"
        "s.dispatchEvent(new Event('input', {bubbles: true}))"
    ),
}


class Watched:
    """A page and the processor time of its main thread, which a busy machine does not stretch as it does waits."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.session: CDPSession = page.context.new_cdp_session(page)
        self.session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy(self) -> float:
        found = self.session.send("Performance.getMetrics")["metrics"]
        return float(next(item["value"] for item in found if item["name"] == "TaskDuration")) * 1e3

    def measure(self, work: str) -> tuple[float, float]:
        """Milliseconds of an interaction: until its two frames have come, and of the main thread's processor time."""
        self.page.bring_to_front()
        before = self.busy()
        times: list[float] = self.page.evaluate(MEASURE % (work, ACTS))
        return statistics.median(times), (self.busy() - before) / ACTS


def costs(context: BrowserContext, pages: dict[str, Page], names: Iterable[str]) -> dict[str, dict[str, float]]:
    """By interaction: `wall` and `busy` of the last page against an empty one, and `same` against the first page.

    `busy` takes the main thread's processor time for the wait beyond the two frames. The pages take turns.
    """
    empty_page = context.new_page()
    empty = Watched(empty_page)
    watched = [Watched(page) for page in pages.values()]
    result = {}
    for name in names:
        idles: list[float] = []
        sides: list[list[tuple[float, float]]] = [[] for _ in watched]
        for _ in range(ROUNDS):
            idles.append(empty.measure("void i")[0])
            for side, found in zip(watched, sides, strict=True):
                found.append(side.measure(INTERACTIONS[name]))
        idle = statistics.median(idles)
        walls = [statistics.median(wall for wall, _ in found) for found in sides]
        busy = [statistics.median(busy for _, busy in found) for found in sides]
        result[name] = {
            "wall": walls[-1] / idle,
            "busy": (idle + busy[-1]) / idle,
            "same": (idle + busy[-1]) / (idle + busy[0]),
        }
        print(
            f"{name:9}", ", ".join(f"{key} {value:.2f}" for key, value in result[name].items()), f"({busy[-1]:.1f} ms)"
        )
    empty_page.close()
    return result


@pytest.fixture(scope="module")
def short(server: Live) -> str:
    return upload(server, "short.jsonl", lines(agent_session("short", turns=40, rounds=20, seed=5)))


@pytest.fixture(scope="module")
def long(server: Live) -> str:
    return upload(server, "refactor.jsonl", lines(agent_session("refactor", turns=300, rounds=20, seed=5)))


@pytest.fixture(scope="module")
def marathon(server: Live) -> str:
    session = agent_session("marathon", turns=300, rounds=360, seed=2, tool_seconds=0.3)
    return upload(server, "marathon.jsonl", lines(session))


def test_an_interaction_at_300_turns_costs_little_beside_an_empty_page(
    view: Callable[..., Page], context: BrowserContext, short: str, long: str
) -> None:
    pages = {"short": view(f"#session={short}"), "long": view(f"#session={long}")}
    found = costs(context, pages, INTERACTIONS)
    assert {name: ratio for name, cost in found.items() if (ratio := cost["busy"]) > BUDGET} == {}
    assert {name: ratio for name, cost in found.items() if (ratio := cost["same"]) > SAME} == {}


def test_only_the_visible_turns_exist(view: Callable[..., Page], long: str) -> None:
    page = view(f"#session={long}")
    frames(page)
    assert page.locator("#turns .turn").count() < 40
    page.locator("#turns").focus()
    page.keyboard.press("End")
    expect(page.locator('[data-turn="299"]')).to_have_attribute("aria-selected", "true")
    assert page.locator("#turns .turn").count() < 40
    assert page.locator('[data-turn="0"]').count() == 0


def test_100_000_rounds_are_never_all_sent_and_can_all_be_reached(
    view: Callable[..., Page], server: Live, marathon: str
) -> None:
    page = view()
    sizes: dict[str, int] = {}

    def arrived(response: Any) -> None:
        if "/v1/viewer/" in response.url:
            sizes[response.url] = int(response.headers.get("content-length", 0))

    page.on("response", arrived)
    page.goto(f"{server.url}/viewer/#session={marathon}")
    page.wait_for_selector("#shown:not([hidden])")
    view_url = {"ref": marathon, "from_turn": 299}
    about = server.get("/v1/viewer/session", params=view_url, headers=headers()).json()
    assert about["rounds"] > 100_000
    assert sum(sizes.values()) < 1_500_000, sizes
    assert not [url for url in sizes if "/rounds" in url], "no round is wide enough to be seen yet"
    for turn in (3, 150, 297):
        page.evaluate("(turn) => { location.hash = location.hash.replace(/&turn=.*/, '') + '&turn=' + turn; }", turn)
        expect(page.locator("#inspector h2").first).to_have_text(f"Turn {turn}")
        page.keyboard.press("z")
        for _ in range(3):
            page.keyboard.press("+")
        expect(page.locator("#times .lanes")).to_have_attribute("data-detail", "rounds")
        page.keyboard.press("0")
        frames(page)
    assert sum(sizes.values()) < 4_000_000


def test_interactions_at_100_000_rounds_cost_as_little(
    view: Callable[..., Page], context: BrowserContext, short: str, marathon: str
) -> None:
    pages = {"short": view(f"#session={short}"), "marathon": view(f"#session={marathon}")}
    found = costs(context, pages, ("select", "scroll", "zoom", "pan", "zoom out"))
    assert {name: ratio for name, cost in found.items() if (ratio := cost["busy"]) > BUDGET} == {}
    assert {name: ratio for name, cost in found.items() if (ratio := cost["same"]) > SAME} == {}


@pytest.mark.soak
def test_every_interaction_at_300_turns_is_shown_within_the_budget(
    view: Callable[..., Page], context: BrowserContext, short: str, long: str
) -> None:
    """The time on the clock, for a machine that has a core to spare."""
    pages = {"short": view(f"#session={short}"), "long": view(f"#session={long}")}
    found = costs(context, pages, INTERACTIONS)
    assert {name: ratio for name, cost in found.items() if (ratio := cost["wall"]) > BUDGET} == {}
