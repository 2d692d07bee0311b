"""Every typed error tells clients and logs the same things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlite_agent import errors
from dlite_agent.errors import CheckpointError, ContextOverflow, DliteError, InvalidRequest, KVExhausted, ModelError


def kinds(of: type[DliteError] = DliteError) -> Iterator[type[DliteError]]:
    yield of
    for kind in of.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds(kind)


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_an_error_carries_its_sentence_and_field(kind: type[DliteError]) -> None:
    error = kind("top_p must be at most 1", param="top_p")
    assert (str(error), error.message, error.param) == ("top_p must be at most 1", "top_p must be at most 1", "top_p")
    assert kind("no field is at fault").param is None
    assert 400 <= kind.status < 600
    assert kind.__doc__


def test_codes_tell_errors_apart() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


def test_a_caller_may_catch_by_cause() -> None:
    assert issubclass(ContextOverflow, InvalidRequest)
    assert issubclass(CheckpointError, ModelError)
    assert (InvalidRequest.status, KVExhausted.status, DliteError.status) == (400, 503, 500)
