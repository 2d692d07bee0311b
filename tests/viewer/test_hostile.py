"""Recorded text is untrusted: markup stays text, nothing invisible stays invisible, and 5 MB do not stop the page."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import BrowserContext, Page, expect

from tests.serving import Live
from tests.viewer.browser import open_page, upload
from tests.viewer.sample import hostile_session, lines

SCRIPT = "<script>document.title='pwned'</script>"


def test_markup_is_shown_and_never_becomes_markup(view: Callable[..., Page], server: Live) -> None:
    ref = upload(server, f"{SCRIPT}.jsonl", lines(hostile_session()))
    page = view(f"#session={ref}&turn=0")
    shown = page.locator("#inspector .text")
    expect(shown).to_have_count(4)
    assert "pwned" not in page.title() or SCRIPT in page.title()
    assert page.evaluate("document.scripts.length") == 1
    assert page.evaluate("document.querySelectorAll('.text script, .text img, .text a').length") == 0
    assert SCRIPT in page.locator("#head h1").inner_text()
    assert SCRIPT in shown.first.inner_text()
    assert "javascript:alert(1)" in page.locator("#inspector").inner_text()
    page.locator('[data-turn="1"]').click()
    expect(page.locator("#inspector .facts-grid")).to_contain_text("<script>")
    assert page.evaluate("document.scripts.length") == 1


def test_control_and_reordering_characters_are_made_visible(view: Callable[..., Page], server: Live) -> None:
    ref = upload(server, "hostile.jsonl", lines(hostile_session()))
    page = view(f"#session={ref}&turn=0")
    expect(page.locator("#inspector .text")).to_have_count(4)
    text = page.evaluate(
        "document.querySelector('#inspector').textContent + document.querySelector('#head').textContent"
    )
    assert not [hex(ord(char)) for char in text if ord(char) < 32 and char not in "\n\t"]
    assert not [hex(ord(char)) for char in text if 0x202A <= ord(char) <= 0x202E or 0x2066 <= ord(char) <= 0x2069]
    assert "\u241b[2J" in text, "an escape is shown as its sign"
    assert "⟨U+202E⟩" in text


def test_a_tool_output_of_five_megabytes_opens_in_pieces(view: Callable[..., Page], server: Live) -> None:
    ref = upload(server, "hostile.jsonl", lines(hostile_session()))
    page = view(f"#session={ref}&turn=0")
    output = page.locator("#inspector .text").last
    expect(output).to_contain_text("5.2 M characters")
    length = "(element) => element.querySelector('pre').textContent.length"
    before = output.evaluate(length)
    assert before < 40_000
    output.get_by_role("button").click()
    expect(output.get_by_role("button")).to_be_enabled()
    page.wait_for_function(
        "(n) => [...document.querySelectorAll('#inspector pre')].at(-1).textContent.length > n", arg=before
    )
    assert output.evaluate(length) < 400_000


def test_the_policy_stops_what_would_slip_through(context: BrowserContext, server: Live) -> None:
    complaints: list[str] = []
    page = open_page(context, server, complaints=complaints)
    stopped = page.evaluate(
        """() => {
          try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; }
          return null;
        }"""
    )
    assert stopped == "TypeError"
    assert any("TrustedHTML" in complaint for complaint in complaints), complaints
    page.close()
