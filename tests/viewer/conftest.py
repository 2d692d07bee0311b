"""One browser, one server and a few opened sessions for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.serving import Live
from tests.viewer.browser import browser, open_page, tiny_server, upload
from tests.viewer.sample import agent_session, lines

expect.set_options(timeout=60_000)  # a limit for a busy machine, not a wait


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with tiny_server(tmp_path_factory.mktemp("viewer")) as running:
        yield running


@pytest.fixture(scope="session")
def context(chrome: Browser) -> Iterator[BrowserContext]:
    opened = chrome.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    opened.set_default_timeout(120_000)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def drafted(server: Live) -> str:
    """A DLite session of 24 turns with folded idle, a divergence, failed and overlapping tools."""
    return upload(server, "fix-the-parser.jsonl", lines(agent_session(idle=900.0)))


@pytest.fixture(scope="session")
def plain(server: Live) -> str:
    """The same turns one token at a time."""
    return upload(server, "fix-the-parser-ar.jsonl", lines(agent_session(mode="ar")))


@pytest.fixture
def view(context: BrowserContext, server: Live) -> Iterator[Callable[[str], Page]]:
    """Opens the viewer at a place. What the page complained of in its console fails the test."""
    pages: list[Page] = []
    complaints: list[str] = []

    def opened(hash_: str = "", **options: Any) -> Page:
        page = open_page(context, server, hash_, complaints=complaints, **options)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []
