from __future__ import annotations

import pytest

from dlite_agent.trace.redact import MARK, Redactor

_KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("key sk-abcdefghijklmnop1234 end", "sk-abcdefghijklmnop1234"),
        ("ghp_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst"),
        ("id AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        (f"before {_KEY} after", "MIIabc"),
        ("-----BEGIN PRIVATE KEY-----\nMIIcut", "MIIcut"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("git clone https://me:hunter22@example.org/x", "hunter22"),
        ("export API_KEY=qwerty99", "qwerty99"),
        ('{"password": "p w"}', "p w"),
        (r"{\"client_secret\": \"zyx\"}", "zyx"),
        ("password: correct9horse", "correct9horse"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", "eyJzdWIiOiIx"),
    ],
)
def test_secrets_in_text_are_replaced(text: str, secret: str) -> None:
    found = Redactor().text(text)
    assert secret not in found
    assert MARK in found
    assert Redactor().text(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=100 and prompt_tokens: 12345678",
        "token = tokenizer.next(stream)",
        "def f(token: str) -> None: ...",
        "https://example.org:8080/a@b",
        "the password is checked in auth.py",
        "basic idea",
        "",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert Redactor().text(text) == text


def test_values_under_secret_keys_and_literals() -> None:
    redactor = Redactor(literals=("swordfish", ""))
    value = {
        "env": {"GITHUB_TOKEN": "x", "HOME": "/root", "max_tokens": 5, "api_key": None},
        "argv": ["run", "--with=swordfish"],
        "swordfish": 1,
    }
    assert redactor.value(value) == {
        "env": {"GITHUB_TOKEN": MARK, "HOME": "/root", "max_tokens": 5, "api_key": None},
        "argv": ["run", f"--with={MARK}"],
        MARK: 1,
    }
