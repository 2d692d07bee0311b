"""A session that runs while it is looked at, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.serving import Live
from tests.viewer.browser import say


def test_turns_appear_while_the_session_runs(view: Callable[..., Page], server: Live) -> None:
    say(server, "First.", "watched", max_tokens=4)
    page = view()
    page.locator(".session", has_text="watched").click()
    expect(page.locator("#turns .turn")).to_have_count(1)
    expect(page.locator("#app")).to_have_attribute("data-live", "on")
    say(server, "Second.", "watched", max_tokens=4)
    expect(page.locator("#turns .turn")).to_have_count(2)
    page.locator('[data-turn="1"]').click()
    expect(page.locator("#inspector")).to_contain_text("Second.")


def test_a_running_turn_is_marked_until_it_ends(view: Callable[..., Page], server: Live) -> None:
    say(server, "Begin.", "long-running", max_tokens=2)
    page = view()
    page.locator(".session", has_text="long-running").click()
    expect(page.locator("#turns .turn")).to_have_count(1)
    thread = threading.Thread(target=say, args=(server, "Go on and on.", "long-running"), kwargs={"max_tokens": 1500})
    thread.start()
    running = page.locator("#head .badge", has_text="running")
    expect(running).to_be_visible()
    thread.join(120)
    expect(running).to_be_hidden()
    row = page.locator('[data-turn="1"]')
    expect(row).to_be_visible()
    expect(page.locator("#head .figures")).to_contain_text("1502")


def test_the_stream_ends_when_the_session_is_left(view: Callable[..., Page], server: Live) -> None:
    say(server, "Here.", "left", max_tokens=2)
    page = view()
    page.locator(".session", has_text="left").click()
    expect(page.locator("#app")).to_have_attribute("data-live", "on")
    recorder = server.service.recorder
    server.wait_until("a listener", lambda: bool(recorder._listeners))
    page.close()
    server.wait_until("no listener", lambda: not recorder._listeners)
