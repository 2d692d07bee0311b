"""The server that the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.serving import Live, shared


@pytest.fixture(scope="session")
def server() -> Live:
    return shared()
