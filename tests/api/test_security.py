"""The door: hosts, origins, keys, media types and sizes; and errors in each API's own envelope."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dlite_agent.api.security import Gate
from dlite_agent.config import ServerSettings, read_keys
from dlite_agent.errors import InvalidRequest
from tests.serving import HI, MODEL, Live

KEYS = ("key-of-alice", "key-of-bobby")


async def _inner(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await JSONResponse({**scope["state"], "size": len(body)})(scope, receive, send)


def call(settings: ServerSettings, method: str = "GET", path: str = "/v1/models", **options: Any) -> httpx.Response:
    """One request through a gate with nothing behind it but an echo."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(Gate(_inner, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "127.0.0.2"])
def test_loopback_names_are_served(host: str) -> None:
    assert call(ServerSettings(), headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "", "[::1", "127.0.0.1.nip.io"])
def test_a_rebound_name_is_not_served(host: str) -> None:
    response = call(ServerSettings(), headers={"host": host})
    assert response.status_code == 403
    assert response.json()["error"]["param"] == "host"


def test_a_web_page_may_not_call() -> None:
    for origin in ("https://evil.example", "null", "http://localhost:9999"):
        response = call(ServerSettings(), headers={"origin": origin})
        assert response.status_code == 403, origin
        assert response.json()["error"]["param"] == "origin"
    assert call(ServerSettings(), headers={"origin": "http://localhost:8000"}).status_code == 200
    allowed = ServerSettings(allowed_origins=("https://tool.example",))
    assert call(allowed, headers={"origin": "https://tool.example"}).status_code == 200


def test_keys_are_asked_for_and_tell_owners_apart() -> None:
    settings = ServerSettings(host="0.0.0.0", api_keys=KEYS)
    assert call(settings).status_code == 401
    assert call(settings, headers={"authorization": "Bearer key-of-carol"}).status_code == 401
    assert call(settings, headers={"authorization": f"Basic {KEYS[0]}"}).status_code == 401
    owners = [
        call(settings, headers=headers).json()["owner"]
        for headers in (
            {"authorization": f"Bearer {KEYS[0]}"},
            {"x-api-key": KEYS[0]},
            {"authorization": f"bearer {KEYS[1]}"},
        )
    ]
    assert owners[0] == owners[1] != owners[2]
    assert KEYS[0] not in owners[0]
    assert call(settings, path="/health").status_code == 200
    assert call(settings, path="/metrics").status_code == 401


def test_errors_of_the_gate_wear_the_api_s_envelope() -> None:
    settings = ServerSettings(api_keys=KEYS)
    error = call(settings, "POST", "/v1/messages", json={}).json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "authentication_error"
    assert error["request_id"].startswith("req_")
    assert call(settings, "POST", "/v1/responses", json={}).json()["error"]["code"] == "invalid_api_key"


def test_only_json_is_taken() -> None:
    for media in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = call(ServerSettings(), "POST", content=b"{}", headers={"content-type": media})
        assert response.status_code == 415, media
    ok = {"content-type": "application/json; charset=utf-8"}
    assert call(ServerSettings(), "POST", content=b"{}", headers=ok).json()["size"] == 2


def test_sizes_are_limited_with_and_without_a_length() -> None:
    settings = ServerSettings(max_body_bytes=1000, max_header_bytes=2000)
    json_type = {"content-type": "application/json"}
    assert call(settings, "POST", content=b"x" * 1001, headers=json_type).status_code == 413
    assert call(settings, headers={"x-large": "x" * 2001}).status_code == 431
    assert call(settings, "POST", content=b"x" * 1000, headers=json_type).status_code == 200


def test_request_ids_are_kept_if_harmless() -> None:
    assert call(ServerSettings(), headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert call(ServerSettings(), headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "example.org"}, "host"),
        ({"port": 70000}, "port"),
        ({"api_keys": ("short",)}, "api_keys"),
        ({"session_conflict": "panic"}, "session_conflict"),
    ],
)
def test_settings_that_would_be_unsafe_or_wrong_are_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ServerSettings(**settings)
    assert refused.value.param == param


def test_keys_are_read_from_a_file_and_do_not_show(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nkey-of-alice\n\nkey-of-bobby\n")
    assert read_keys(file) == KEYS
    assert "alice" not in repr(ServerSettings(api_keys=KEYS))
    file.write_text("# none\n")
    with pytest.raises(InvalidRequest):
        read_keys(file)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe{}",
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"model": 1}',
        b'{"x": "' + b"y" * 99_999,
    ],
    ids=["empty", "cut", "array", "null", "string", "utf-8", "nan", "deep", "type", "open"],
)
def test_malformed_bodies_are_400_in_the_right_shape(server: Live, path: str, body: bytes) -> None:
    response = server.post_raw(path, body)
    assert response.status_code == 400, response.text
    error = response.json()
    if path == "/v1/messages":
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
    else:
        assert error["error"]["type"] == "invalid_request_error"


HUGE = "x" * 10_000_000


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, "context_length_exceeded"),
        ("/v1/completions", {"prompt": HUGE}, "context_length_exceeded"),
        ("/v1/responses", {"input": HUGE}, "context_length_exceeded"),
        ("/v1/messages", {"messages": [{"role": "user", "content": HUGE}], "max_tokens": 1}, "context_length_exceeded"),
        ("/tokenize", {"prompt": HUGE}, "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": HI, "session_id": HUGE}, "invalid_request"),
        ("/v1/messages", {"messages": HI, "max_tokens": 10**400}, "invalid_request"),
        ("/v1/completions", {"prompt": "x", "stop": ["x"] * 1000}, "invalid_request"),
    ],
    ids=["chat", "completions", "responses", "messages", "tokenize", "name", "number", "list"],
)
def test_what_is_huge_is_refused_in_the_right_shape(server: Live, path: str, fields: dict[str, Any], code: str) -> None:
    response = server.post(path, {"model": MODEL, **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert len(response.content) < 10_000


@pytest.mark.parametrize("depth", [60, 500, 900, 925, 935, 945, 960, 990])
def test_deep_tools_are_refused_wherever_they_are_too_deep(server: Live, depth: int) -> None:
    """Reading, comparing and rendering each reach their limit at another depth."""
    nested = b'{"items":' * depth + b"{}" + b"}" * depth
    tool = b'{"type":"function","function":{"name":"f","parameters":' + nested + b"}}"
    fields = b'"model":"%s","messages":[{"role":"user","content":"x"}],"max_tokens":1' % MODEL.encode()
    response = server.post_raw("/v1/chat/completions", b"{" + fields + b',"tools":[' + tool + b"]}")
    assert response.status_code in (200, 400), response.text


def test_a_body_larger_than_the_server_takes_is_refused_at_once(server: Live) -> None:
    assert server.post("/v1/chat/completions", {"x": "x" * (13 << 20)}).status_code == 413


def test_unknown_paths_and_methods_are_typed(server: Live) -> None:
    assert server.get("/v1/nothing").json()["error"]["code"] == "not_found"
    refused = httpx.put(f"{server.url}/v1/sessions/none")
    assert refused.json()["error"]["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "DELETE, GET"
    assert httpx.put(f"{server.url}/v1/sessions/none/fork").headers["allow"] == "POST"


def test_metrics_and_health(server: Live) -> None:
    server.chat(HI, max_tokens=2)
    text = server.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        'vllm:request_success_total{finished_reason="length"}',
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:prefix_cache_hits_total",
        "dlite:steps_total",
    ):
        assert name in text
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json()["status"] == "ready"
