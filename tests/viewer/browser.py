"""A real Chromium over Playwright, and a real server with a tiny random model for it to look at."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from dlite_agent.config import ModelSettings, SchedulerSettings, ServerSettings, Settings
from tests import tokenizers
from tests.helpers import save_model, tiny_model
from tests.serving import Live, live

INSTALL = "apt-get install -y --no-install-recommends chromium"
KEY = "viewer-test-key"
MODEL = "tiny"


def chromium() -> str:
    """The browser's program. Without one the tests fail, and say what to do."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise AssertionError(f"The viewer's tests need Chromium. Run: {INSTALL}")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


def tiny_folder(root: Path) -> Path:
    """A model folder that a server can load: random weights of a small Llama, SmolLM2's tokenizer and template."""
    tokenizer = tokenizers.load("smollm2")
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    folder = save_model(tiny_model("llama", **shape), root / MODEL)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def tiny_server(root: Path) -> Iterator[Live]:
    """Keys, a data folder and content in the log, as an operator who wants to see texts would have it."""
    settings = Settings(
        model=ModelSettings(target=str(tiny_folder(root)), drafter="none", dtype="fp32", threads=1, names=(MODEL,)),
        scheduler=SchedulerSettings(max_running=2),
        server=ServerSettings(api_keys=(KEY, "another-viewer-key"), keepalive_seconds=0.3, log_content=True),
        data_dir=root / "data",
    )
    with live(settings) as server:
        yield server


def headers(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def say(server: Live, text: str, session: str, *, max_tokens: int = 8, key: str = KEY, **fields: Any) -> dict[str, Any]:
    """One turn of a session on the tiny model."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "session_id": session, "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers(key), timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def upload(server: Live, name: str, text: str, *, key: str = KEY) -> str:
    """Gives a file to the server; the reference of its first session."""
    body = {"name": name, "text": text}
    response = httpx.post(f"{server.url}/v1/viewer/files", json=body, headers=headers(key), timeout=600)
    assert response.status_code == 200, response.text
    return str(response.json()["sessions"][0])


def open_page(context: BrowserContext, server: Live, hash_: str = "", *, complaints: list[str]) -> Page:
    """The viewer with the key already given, at a place of it; errors of the page are added to `complaints`."""
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.add_init_script(f"sessionStorage.setItem('dlite-agent-key', '{KEY}')")
    page.goto(f"{server.url}/viewer/{hash_}")
    if "session=" in hash_:
        page.wait_for_selector("#shown:not([hidden])")
        frames(page)
    return page


def frames(page: Page, n: int = 3) -> None:
    """Waits until the page has drawn what it was asked for."""
    page.evaluate("async (n) => { for (let i = 0; i < n; i += 1) await new Promise(requestAnimationFrame); }", n)
