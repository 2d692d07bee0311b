from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.events import Segment, ToolEnd, ToolStart, Unknown
from dlite_agent.trace.formats import EXPORTS, convert, load, loads, post
from dlite_agent.trace.formats.atif import to_atif
from dlite_agent.trace.formats.build import Document
from dlite_agent.trace.formats.chrome import to_chrome
from dlite_agent.trace.formats.otel import SCHEMA_URL, send, to_otlp
from dlite_agent.trace.log import Log, dump_lines
from dlite_agent.trace.phases import timelines
from tests.trace import sample
from tests.trace.formats.data_files import DATA, FORMATS

TIMED = [name for name in FORMATS if not name.startswith(("swe_agent", "tracelab", "openai"))]


def through_json(value: dict[str, Any]) -> Document:
    return Document.of(json.dumps(value).encode())


# --- ATIF ------------------------------------------------------------------------------------------------------------


def check_atif(document: dict[str, Any]) -> None:
    """The rules of ATIF 1.7 that a strict reader enforces."""
    assert document["schema_version"] == "ATIF-v1.7"
    assert {"name", "version"} <= document["agent"].keys() <= {"name", "version", "model_name", "extra"}
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        allowed = {"step_id", "timestamp", "source", "message", "extra"}
        if step["source"] == "agent":
            allowed |= {"reasoning_content", "tool_calls", "observation", "metrics"}
        assert step.keys() <= allowed
        assert isinstance(step["message"], str)
        calls = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        assert all(isinstance(call["arguments"], dict) for call in step.get("tool_calls", []))
        assert all(r["source_call_id"] in calls for r in step.get("observation", {"results": []})["results"])


def test_atif_carries_a_session_there_and_back() -> None:
    document = to_atif(sample.log())
    check_atif(document)
    assert loads(through_json(document)).events == sample.events()


def test_atif_fields_hold_what_other_readers_need() -> None:
    document = to_atif(sample.log())
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    agent = document["steps"][2]
    assert agent["metrics"] == {
        "completion_token_ids": [4, 5, 6],
        "prompt_tokens": 100,
        "completion_tokens": 400,
        "cached_tokens": 40,
    }
    assert agent["tool_calls"] == [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}]
    (result,) = agent["observation"]["results"]
    assert result["content"] == "a b"
    assert result["extra"]["duration_s"] == pytest.approx(3.0)
    assert (result["extra"]["exit_code"], result["extra"]["sandbox"]) == (0, "bubblewrap")
    assert agent["timestamp"] == "2027-01-15T08:00:54.000Z"
    assert document["final_metrics"]["total_completion_tokens"] == 800
    own = json.dumps(document["extra"]) + json.dumps([step.get("extra") for step in document["steps"]])
    assert "looking" not in own
    assert "list <files>" not in own


def test_atif_there_and_back_with_hard_content() -> None:
    events = sample.events()
    events.insert(3, Unknown({"kind": "gate", "t": 1}, "unknown kind 'gate'"))
    events = [
        event.model_copy(update={"output": "longer than the message"}) if isinstance(event, ToolEnd) else event
        for event in events
    ]
    events.append(
        ToolStart(segment=sample.SEGMENT, t=110.0, session="s", turn=1, call_id="c9", name="web", arguments="not json")
    )
    assert loads(through_json(to_atif(Log(events)))).events == events
    bare = [event if isinstance(event, Unknown) else event.without_content() for event in events]
    assert loads(through_json(to_atif(Log(bare)))).events == bare


def test_atif_wants_one_session() -> None:
    both = Log([*sample.events("a"), *sample.events("b")[1:]])
    with pytest.raises(InvalidRequest, match="choose one of: a, b"):
        to_atif(both)
    far = [Segment(segment=sample.SEGMENT, t=0.0, wall=1e12), *sample.events()[1:]]
    with pytest.raises(InvalidRequest, match="beyond the calendar"):
        to_atif(Log(far))
    with pytest.raises(InvalidRequest, match="steps"):
        loads(Document.of(b'{"schema_version": "ATIF-v1.7"}'))


@pytest.mark.parametrize("name", FORMATS)
def test_imported_sessions_pass_through_atif_and_our_own_format(name: str, tmp_path: Path) -> None:
    log = load(DATA / name)
    for session in log.sessions():
        part = log.of_session(session)
        document = to_atif(part)
        check_atif(document)
        assert loads(through_json(document)).events == part.events
    convert(DATA / name, "dlite", tmp_path / "own")
    assert load(tmp_path / "own").events == log.events
    assert [v.seconds() for v in timelines(load(tmp_path / "own"))] == [v.seconds() for v in timelines(log)]


# --- Chrome ----------------------------------------------------------------------------------------------------------


def check_chrome(document: dict[str, Any]) -> None:
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in {"X", "M", "C", "i"}
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == set(lanes)
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_chrome_lanes_never_overlap() -> None:
    events = sample.events()
    for number, (start, end) in enumerate([(104.5, 106.0), (105.0, 107.5), (106.0, 106.5)]):
        call = f"x{number}"
        events.append(ToolStart(segment=sample.SEGMENT, t=start, session="s", turn=0, call_id=call, name=call))
        events.append(ToolEnd(segment=sample.SEGMENT, t=end, session="s", turn=0, call_id=call))
    document = to_chrome(Log(events))
    check_chrome(document)
    tools = {event["name"]: event["tid"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert len({tools["bash"], tools["x0"], tools["x1"]}) == 3
    assert tools["x2"] == tools["x0"]


def test_chrome_shows_rounds_tokens_and_first_token() -> None:
    events = to_chrome(sample.log())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("draft") == names.count("verify") == names.count("commit") == 200
    assert names.count("decode") == 2
    assert [e["ts"] for e in events if e["name"] == "first token"] == [2_020_000, 8_020_000]
    assert [e["args"]["tokens"] for e in events if e["ph"] == "C"] == [500, 920]
    (turn0,) = [e for e in events if e["name"] == "turn 0"]
    assert (turn0["ts"], turn0["dur"]) == (0, 4_000_000)


@pytest.mark.parametrize("name", FORMATS)
def test_chrome_of_every_import(name: str) -> None:
    check_chrome(to_chrome(load(DATA / name)))


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


def spans(request: dict[str, Any]) -> list[dict[str, Any]]:
    (resource,) = request["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    assert scope["schemaUrl"] == SCHEMA_URL
    return list(scope["spans"])


def values(span: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}


def check_otlp(request: dict[str, Any]) -> None:
    found = spans(request)
    ids = {span["spanId"] for span in found}
    assert len(ids) == len(found)
    for span in found:
        assert (len(span["traceId"]), len(span["spanId"])) == (32, 16)
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert span.get("parentSpanId", span["spanId"]) in ids


def test_otlp_spans_of_a_session() -> None:
    request = to_otlp(sample.log())
    check_otlp(request)
    found = {span["name"]: span for span in spans(request)}
    root, chat, tool = found["invoke_agent dlite-agent"], found["chat qwen"], found["execute_tool bash"]
    assert int(root["startTimeUnixNano"]) == (int(sample.WALL) + 50) * 10**9
    assert int(tool["endTimeUnixNano"]) - int(tool["startTimeUnixNano"]) == 3 * 10**9
    assert chat["parentSpanId"] == root["spanId"]
    assert values(root)["gen_ai.conversation.id"] == "s"
    attributes = values(next(span for span in spans(request) if span["name"] == "chat qwen"))
    assert attributes["gen_ai.usage.input_tokens"] == "100"
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == "40"
    assert attributes["gen_ai.response.finish_reasons"] == {"values": [{"stringValue": "tool_calls"}]}
    assert attributes["dlite.tau"] == pytest.approx(4.0)
    assert attributes["dlite.accepted_tokens"] == "300"
    assert values(tool)["gen_ai.tool.call.id"] == "c1"
    assert {"dlite.queue", "dlite.restore", "dlite.prefill", "dlite.decode"} <= found.keys()
    assert "dlite.tool" not in found
    assert "looking" not in json.dumps(request)


@pytest.mark.parametrize("name", TIMED)
def test_otlp_of_every_timed_import(name: str) -> None:
    check_otlp(to_otlp(load(DATA / name)))


def test_otlp_wants_wall_clock_times() -> None:
    with pytest.raises(InvalidRequest, match="no wall-clock times"):
        to_otlp(load(DATA / "swe_agent.traj"))


class _Receiver(BaseHTTPRequestHandler):
    answer = (200, b"{}")
    got: list[tuple[str, str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        status, text = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test output clean."""


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[_Receiver]]]:
    handler = type("Handler", (_Receiver,), {"got": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", handler
        server.shutdown()
        thread.join()


def test_otlp_over_http(receiver: tuple[str, type[_Receiver]]) -> None:
    url, handler = receiver
    request = to_otlp(sample.log())
    send(url, request)
    assert handler.got == [("/v1/traces", "application/json", request)]


def test_a_session_file_goes_to_a_receiver(receiver: tuple[str, type[_Receiver]], tmp_path: Path) -> None:
    url, handler = receiver
    source = tmp_path / "s.jsonl"
    source.write_text(dump_lines([*sample.events("a"), *sample.events("b")[1:]]))
    post(source, "otel", url, session="b")
    ((path, _, request),) = handler.got
    assert path == "/v1/traces"
    assert {values(span).get("gen_ai.conversation.id") for span in spans(request)} == {"b", None}
    with pytest.raises(InvalidRequest, match="goes to a file") as caught:
        post(source, "atif", url)
    assert caught.value.param == "to"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, b"no"), "answered 400"),
        ((200, b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}'), "rejected 2 spans: too old"),
    ],
)
def test_otlp_refusals_are_told(receiver: tuple[str, type[_Receiver]], answer: tuple[int, bytes], message: str) -> None:
    url, handler = receiver
    handler.answer = answer
    with pytest.raises(InvalidRequest, match=message):
        send(url, to_otlp(sample.log()))


def test_otlp_endpoints_that_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match="http://"):
        send("file:///tmp/x", {})
    with pytest.raises(InvalidRequest, match="cannot be reached"):
        send("http://127.0.0.1:9", {}, timeout=1.0)


# --- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", EXPORTS)
def test_convert_writes_each_export(to: str, tmp_path: Path) -> None:
    source, out = tmp_path / "s.jsonl", tmp_path / "out"
    source.write_text(dump_lines([*sample.events("a"), *sample.events("b")[1:]]))
    convert(source, to, out, session="b")
    text = out.read_text()
    assert '"b"' in text or "session b" in text
    assert '"a"' not in text
    assert "session a" not in text
    json.loads(text.split("\n")[0] if to in ("dlite", "otel") else text)


def test_convert_refusals(tmp_path: Path) -> None:
    source = tmp_path / "s.jsonl"
    source.write_text(dump_lines(sample.events()))
    with pytest.raises(InvalidRequest, match="no export 'yaml'") as caught:
        convert(source, "yaml", tmp_path / "out")
    assert caught.value.param == "to"
    with pytest.raises(InvalidRequest, match="Cannot write"):
        convert(source, "chrome", tmp_path / "no" / "out")
    with pytest.raises(NotFound, match="no session 'x'"):
        convert(source, "chrome", tmp_path / "out", session="x")
    assert isinstance(load(source).events[0], Segment)
