"""The server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Live, close_shared, shared


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    yield shared()
    close_shared()
