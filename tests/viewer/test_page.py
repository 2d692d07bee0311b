"""The page in a real browser: it loads, zooms, leads to the texts, computes, compares and opens files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from dlite_agent.trace.amdahl import Equivalent, analyse
from tests.serving import Live
from tests.trace.formats.data_files import DATA, FORMATS
from tests.trace.sample import events as two_turns
from tests.viewer.browser import KEY, frames, headers, open_page
from tests.viewer.sample import agent_session, lines

View = Callable[..., Page]

INK = """() => {
  const canvas = document.querySelector('#times .plot');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  return [...seen];
}"""


def colour_of(page: Page, name: str) -> str:
    """A colour of the theme as `r,g,b`."""
    found = page.evaluate(
        """(name) => {
          const probe = document.createElement('i');
          probe.style.color = `var(--${name})`;
          document.body.append(probe);
          const value = getComputedStyle(probe).color;
          probe.remove();
          return value;
        }""",
        name,
    )
    return ",".join(re.findall(r"\d+", str(found))[:3])


def overview(server: Live, ref: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/viewer/session", params={"ref": ref}, headers=headers()).json()
    return found


def test_a_session_loads_with_all_its_lanes_figures_and_badges(view: View, server: Live, drafted: str) -> None:
    page = view(f"#session={drafted}")
    names = page.locator("#times .names span").all_inner_texts()
    assert names == ["queue", "restore", "prefill", "decode", "accepted", "tool", "client", "context"]
    figures = page.locator("#head .figures").inner_text()
    about = overview(server, drafted)
    assert f"{about['means']['tau']:.2f}" in figures
    assert f"{about['amdahl']['bound'][0]:.2f}×" in figures
    ink = page.evaluate(INK)
    for phase in ("queue", "restore", "prefill", "decode", "tool", "mask"):
        assert colour_of(page, f"phase-{phase}") in ink, phase
    assert colour_of(page, "warn") in ink, "no divergence mark"
    assert colour_of(page, "bad") in ink, "no mark of a failed tool"
    text = page.locator("#turns").inner_text()
    for badge in ("device", "host", "% cached", "bubblewrap", "run_tests"):
        assert badge in text, badge
    assert "1 idle folded" in page.locator("#range").inner_text()
    sparks = page.locator(f'.session[data-ref="{drafted}"] .spark')
    expect(sparks).to_have_count(1)


def test_a_shipped_recording_loads_and_its_short_waits_are_not_folded_over_a_tool(view: View) -> None:
    page = view("#session=shipped~failing-test~0")
    assert "folded" not in page.locator("#range").inner_text(), "a tool of 30 s with two short waits around it"
    assert "null" not in page.locator("#head").inner_text()
    first = page.locator('[data-turn="0"] .badges').inner_text()
    assert first.startswith("tool failed"), "what failed comes first, since badges without room are left out"


def test_zooming_to_a_turn_shows_its_rounds_as_draft_verify_and_commit(view: View, drafted: str) -> None:
    page = view(f"#session={drafted}")
    assert page.locator("#times .lanes").get_attribute("data-detail") == "turns"
    assert colour_of(page, "part-draft") not in page.evaluate(INK)
    page.locator('[data-turn="3"]').click()
    page.keyboard.press("z")
    expect(page.locator("#times .lanes")).to_have_attribute("data-detail", "rounds")
    box = page.locator("#times .plot").bounding_box()
    decode = page.locator("#times .names span", has_text="decode").bounding_box()
    assert box is not None
    assert decode is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, decode["y"] + 8)
    for _ in range(6):
        page.mouse.wheel(0, -60)
        frames(page)
    expect(page.locator("#times .lanes")).to_have_attribute("data-detail", "rounds")
    ink = page.evaluate(INK)
    for part in ("draft", "verify", "commit"):
        assert colour_of(page, f"part-{part}") in ink, part
    page.mouse.move(box["x"] + box["width"] * 0.25 + 2, decode["y"] + 8)
    tip = page.locator("#tip").inner_text()
    assert re.search(r"Turn 3: \d of 7 drafts accepted\ndraft .*, verify .*, rest .*\ncontext \d+, batch 1", tip), tip
    page.keyboard.press("0")
    expect(page.locator("#times .lanes")).to_have_attribute("data-detail", "turns")


def test_the_wheel_zooms_at_the_pointer_and_dragging_moves(view: View, drafted: str) -> None:
    page = view(f"#session={drafted}")
    whole = page.locator("#range").inner_text()
    box = page.locator("#times .plot").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 300, box["y"] + 120)
    page.mouse.wheel(0, -400)
    frames(page)
    zoomed = page.locator("#range").inner_text()
    assert zoomed != whole
    before = page.evaluate(INK)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 120, steps=4)
    page.mouse.up()
    frames(page)
    assert page.locator("#range").inner_text().split(" of ")[1] == zoomed.split(" of ")[1]
    assert page.evaluate(INK) != before


def test_a_click_on_a_tool_leads_to_its_output(view: View, server: Live, drafted: str) -> None:
    page = view(f"#session={drafted}&turn=2")
    page.keyboard.press("z")
    frames(page)
    turn = overview(server, drafted)["turns"][2]
    assert len(turn["tools"]) == 3, "the turn has overlapping calls"
    call = turn["tools"][0]
    plot, lane = page.locator("#times .plot"), page.locator("#times .names span", has_text="tool")
    box, name = plot.bounding_box(), lane.bounding_box()
    assert box is not None
    assert name is not None
    window = turn["tools"][-1]["end"] - turn["start"]
    assert window > 0
    # The window of `z` is the turn with its tools and 6 % on both sides; the first row of three is the first call.
    last = max(one["end"] for one in turn["tools"])
    wide = last - turn["start"]
    middle = (call["start"] + call["end"]) / 2 - turn["start"]
    x = box["x"] + box["width"] * (middle + 0.06 * wide) / (1.12 * wide)
    page.mouse.click(x, name["y"] + name["height"] / 2 - 10)
    expect(page.locator("#inspector .text.at")).to_have_count(2)
    assert call["name"] in page.locator("#inspector .text.at").first.inner_text()
    assert "token = next(stream)" in page.locator("#inspector .text.at").last.inner_text()
    assert f"{call['name']} in turn 2" in page.locator("#inspector .text.at").last.inner_text()


def test_sliders_compute_what_the_report_computes(view: View, server: Live, drafted: str) -> None:
    page = view(f"#session={drafted}")
    about = overview(server, drafted)
    ar = Equivalent(**about["amdahl"]["ar"])
    for s_d_slider, tool in ((1000, 100), (500, 0), (333, 200)):
        page.locator("#slider-sd").fill(str(s_d_slider))
        page.locator("#slider-tool").fill(str(tool))
        s_d = 0.5 * 64 ** (s_d_slider / 1000)
        changed = {phase: value * (tool / 100 if phase == "tool" else 1) for phase, value in about["seconds"].items()}
        expected = analyse({**changed, "decode": ar.seconds / s_d}, ar)
        assert page.locator("#answer-workflow").inner_text() == f"{expected.workflow.value:.2f}×"
        assert page.locator("#answer-bound").inner_text() == f"{expected.bound.value:.2f}×"
        assert page.locator("#answer-line").inner_text().startswith(f"f {expected.f.value:.3f};")
    page.get_by_role("button", name="As it ran").click()
    assert page.locator("#answer-workflow").inner_text() == f"{about['amdahl']['workflow'][0]:.2f}×"
    assert page.locator("#answer-now").inner_text() == "1.00×"


def test_two_sessions_are_compared_on_one_scale(view: View, server: Live, plain: str, drafted: str) -> None:
    page = view(f"#session={plain}")
    page.locator("#compare").click()
    page.locator(f'.session[data-ref="{drafted}"]').click()
    expect(page.locator("#times-b .plot")).to_be_visible()
    first, second = overview(server, plain), overview(server, drafted)
    work = [
        sum(value for phase, value in one["seconds"].items() if phase not in ("client", "outage"))
        for one in (first, second)
    ]
    line = page.locator("#versus-line").inner_text()
    assert f"{work[0] / work[1]:.2f}×" in line
    assert f"{second['amdahl']['workflow'][0]:.2f}×" in line
    expect(page.locator("#turns .pair").nth(3)).to_be_attached()
    page.locator("#zoom-in").click()
    frames(page)
    widths = page.evaluate("[...document.querySelectorAll('.lanes .plot')].map((canvas) => canvas.clientWidth)")
    assert widths[0] == widths[1]
    expect(page).to_have_url(re.compile(re.escape(f"with={drafted.replace('~', '%7E')}")))
    page.keyboard.press("Escape")
    expect(page.locator("#times-b")).to_be_hidden()


DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const how = { dataTransfer: data, bubbles: true, cancelable: true };
  const send = (kind) => window.dispatchEvent(new DragEvent(kind, how));
  send('dragenter');
  const invited = !document.getElementById('drop').hidden;
  send('dragover');
  send('drop');
  return invited;
}"""


def test_a_dropped_file_is_opened(view: View, drafted: str) -> None:
    assert drafted, "so that there is a session to choose"
    page = view()
    expect(page.locator("#state h2")).to_have_text("Choose a session")
    text = lines(two_turns("dropped-session"))
    assert page.evaluate(DROP, ["by-hand.jsonl", text]) is True
    expect(page.locator("#head h1")).to_have_text("by-hand.jsonl")
    expect(page.locator("#turns .turn")).to_have_count(2)
    assert page.locator("#drop").is_hidden()
    expect(page).to_have_url(re.compile("session=file%7E"))


def test_files_of_every_foreign_format_open(view: View) -> None:
    page = view()
    for name in FORMATS:
        page.evaluate(DROP, [name, (DATA / name).read_text()])
        expect(page.locator("#head h1")).to_have_text(name)
        expect(page.locator("#turns .turn").first).to_be_visible()


def test_a_foreign_file_says_what_cannot_be_known(view: View) -> None:
    page = view()
    page.evaluate(DROP, ["pi.jsonl", (DATA / "pi.jsonl").read_text()])
    expect(page.locator("#head h1")).to_have_text("pi.jsonl")
    assert "model" in page.locator("#times .names").inner_text()
    assert "Model calls are not split" in (page.locator("#head .remarks").text_content() or "")
    assert "upper limits" in page.locator("#amdahl").inner_text()
    page.locator('[data-turn="0"]').click()
    expect(page.locator("#inspector")).to_contain_text("count the lines")
    expect(page.locator("#inspector")).to_contain_text("wc -l a")


def test_a_file_of_no_known_format_is_refused_in_words(context: BrowserContext, server: Live) -> None:
    complaints: list[str] = []
    page = open_page(context, server, complaints=complaints)
    page.evaluate(DROP, ["holiday.txt", "sun and sand"])
    expect(page.locator("#state [role=alert]")).to_contain_text("holiday.txt: The file is of no session format")
    page.get_by_role("button", name="All sessions").click()
    expect(page.locator("#state h2")).to_be_visible()
    assert all("400" in complaint for complaint in complaints), complaints
    page.close()


def test_the_keyboard_reaches_everything(view: View, drafted: str) -> None:
    page = view(f"#session={drafted}")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator('[data-turn="1"]')).to_have_attribute("aria-selected", "true")
    page.keyboard.press("k")
    expect(page).to_have_url(re.compile("turn=0$"))
    assert "Turn 0" in page.locator("#said").inner_text()
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("turn=5$"))  # the first turn with a failed tool
    page.keyboard.press("i")
    expect(page.locator("#fold")).to_have_attribute("aria-pressed", "false")
    assert "folded" not in page.locator("#range").inner_text()
    page.keyboard.press("?")
    expect(page.locator("#help-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("ar")
    names = page.locator(".session .name").all_inner_texts()
    assert names
    assert all("ar" in name for name in names)
    page.keyboard.press("Escape")
    page.locator("#turns").focus()
    page.keyboard.press("End")
    expect(page.locator('[data-turn="23"]')).to_have_attribute("aria-selected", "true")
    page.locator("#times .lanes").focus()
    page.keyboard.press("+")
    frames(page)
    before = page.evaluate(INK)
    page.keyboard.press("ArrowLeft")
    frames(page)
    assert page.evaluate(INK) != before


def test_a_link_leads_to_the_turn_and_back_goes_back(view: View, drafted: str, plain: str) -> None:
    page = view(f"#session={drafted}&turn=7")
    expect(page.locator('[data-turn="7"]')).to_have_attribute("aria-selected", "true")
    expect(page.locator("#inspector")).to_contain_text("Turn 7")
    page.locator(f'.session[data-ref="{plain}"]').click()
    expect(page.locator("#crumb")).to_have_text("fix-the-parser-ar.jsonl")
    page.go_back()
    expect(page.locator("#crumb")).to_have_text("fix-the-parser.jsonl")
    expect(page.locator("#inspector")).to_contain_text("Turn 7")
    missing = view(f"#session={drafted}&turn=999")
    expect(missing.locator("#inspector")).to_contain_text("The session has no turn 999.")


def test_everything_that_can_be_used_has_a_name(view: View, drafted: str) -> None:
    page = view(f"#session={drafted}&turn=5")
    expect(page.locator("#inspector .text").first).to_be_visible()
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, [tabindex="0"], canvas[role], dialog, nav, main, aside')]
          .filter((element) => !(element.textContent.trim() || element.getAttribute('aria-label')
            || element.getAttribute('aria-labelledby') || element.labels?.length))
          .map((element) => element.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    option = page.locator('[data-turn="5"]')
    assert option.get_attribute("role") == "option"
    assert option.get_attribute("aria-setsize") == "24"
    assert re.match(r"Turn 5, .*decode \d+ %", option.get_attribute("aria-label") or "")


@pytest.mark.parametrize("width", [360, 820])
def test_nothing_sticks_out_on_a_narrow_screen(chrome: Any, server: Live, drafted: str, width: int) -> None:
    narrow = chrome.new_context(viewport={"width": width, "height": 800}, has_touch=True)
    complaints: list[str] = []
    page = open_page(narrow, server, f"#session={drafted}", complaints=complaints)
    frames(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width < 760:
        expect(page.locator("#side")).not_to_be_in_viewport()
        page.locator("#menu").click()
        expect(page.locator("#side")).to_be_in_viewport()
        page.locator(f'.session[data-ref="{drafted}"]').click()
        expect(page.locator("#side")).not_to_be_in_viewport()
    page.locator('[data-turn="2"]').tap()
    expect(page.locator("#inspector")).to_be_in_viewport()
    assert complaints == []
    narrow.close()


def test_light_and_dark_follow_the_system_and_the_button(chrome: Any, server: Live, drafted: str) -> None:
    dark = chrome.new_context(color_scheme="dark")
    complaints: list[str] = []
    page = open_page(dark, server, f"#session={drafted}", complaints=complaints)
    background = "getComputedStyle(document.body).backgroundColor"
    night = page.evaluate(background)
    assert colour_of(page, "phase-decode") in page.evaluate(INK)
    page.locator("#theme").click()
    frames(page)
    day = page.evaluate(background)
    assert day != night
    assert colour_of(page, "phase-decode") in page.evaluate(INK)
    page.reload()
    page.wait_for_selector("#shown:not([hidden])")
    assert page.evaluate(background) == day, "the choice is kept"
    assert complaints == []
    dark.close()


def test_the_key_is_asked_for_and_stays_out_of_every_address(chrome: Any, server: Live, drafted: str) -> None:
    fresh = chrome.new_context()
    page = fresh.new_page()
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.goto(f"{server.url}/viewer/#session={drafted}")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.locator("#key-value").fill("not-the-key")
    page.get_by_role("button", name="Use", exact=True).click()
    expect(page.locator("#key-problem")).to_have_text("This key is not accepted.")
    page.locator("#key-value").fill(KEY)
    page.get_by_role("button", name="Use", exact=True).click()
    page.wait_for_selector("#shown:not([hidden])")
    assert all(KEY not in url and url.startswith(server.url) for url in seen)
    assert KEY not in page.evaluate("location.href + document.cookie + JSON.stringify(localStorage)")
    assert page.evaluate("sessionStorage.getItem('dlite-agent-key')") == KEY
    fresh.close()


def test_a_large_session_list_is_read_in_pages(server: Live) -> None:
    for _ in range(2):
        body = {"name": "short.jsonl", "text": lines(agent_session("short", turns=2, rounds=3))}
        server.post("/v1/viewer/files", body, headers=headers())
    first, second = (
        server.get("/v1/viewer/sessions", params={"limit": 1, "offset": offset}, headers=headers()).json()
        for offset in (0, 1)
    )
    assert len(first["sessions"]) == len(second["sessions"]) == 1
    assert first["total"] >= 2
    assert first["sessions"] != second["sessions"]
