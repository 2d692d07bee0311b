"""The servers and clients that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.serving import Live, close_shared, live, shared, tiny


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """The default model."""
    yield shared()
    close_shared()


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A random model, for traffic whose answers do not matter."""
    with live(tiny(tmp_path_factory.mktemp("tiny"), max_responses=64)) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0) as made:
        yield made


@pytest.fixture
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=300, max_retries=0) as made:
        yield made
