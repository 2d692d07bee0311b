from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.events import Foreign, TurnEnd, TurnStart
from dlite_agent.trace.formats import IMPORTS, detect, load, loads
from dlite_agent.trace.formats.build import Document
from dlite_agent.trace.log import Log, dump_lines
from tests.trace import sample
from tests.trace.formats.data_files import DATA, FORMATS, nonzero, read


def kept(log: Log) -> list[object]:
    return [event.raw for event in log.events if isinstance(event, Foreign)]


def starts(log: Log) -> list[TurnStart]:
    return [event for event in log.events if isinstance(event, TurnStart)]


def ends(log: Log) -> list[TurnEnd]:
    return [event for event in log.events if isinstance(event, TurnEnd)]


@pytest.mark.parametrize(("name", "expected"), FORMATS.items())
def test_formats_are_told_from_content_alone(name: str, expected: str, tmp_path: Path) -> None:
    copy = tmp_path / "file"
    copy.write_bytes((DATA / name).read_bytes())
    assert load(copy).format == expected
    assert expected in IMPORTS


def test_own_logs_and_foreign_text() -> None:
    own = Document.of(dump_lines(sample.events()).encode())
    assert detect(own) == "dlite"
    assert loads(own).events == sample.events()
    for data in (b"", b"hello", b"{}", b"[1]", b"a,b\n1,2\n", b"\xff\xfe", b'{"resourceSpans": []}'):
        with pytest.raises(InvalidRequest, match="no session format"):
            detect(Document.of(data))
    with pytest.raises(NotFound):
        load(DATA / "none")


def test_pi() -> None:
    log, (view,) = read("pi.jsonl")
    assert view.wall == pytest.approx(10.1)
    assert nonzero(view) == {"model": 6.0, "tool": 2.0, "client": 2.1}
    assert view.seconds(inferred_only=True)["model"] == 0
    assert view.tool_busy() == pytest.approx(3.0)
    first, second = starts(log)
    assert (first.prompt_tokens, first.cached_tokens, first.new_tokens) == (125, 100, 25)
    assert first.messages == [{"role": "user", "content": "count the lines"}]
    assert second.trigger == "tool"
    message = ends(log)[0].message
    assert message is not None
    assert message["reasoning_content"] == "use wc"
    assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "wc -l a"}'}
    assert view.tools[1].error is not None
    assert [raw["type"] for raw in kept(log) if isinstance(raw, dict)] == ["model_change", "message"]


def test_claude_code() -> None:
    log, views = read("claude_code.jsonl")
    view, child = views
    assert (view.session, child.session, child.parent) == ("cc-1", "cc-1/a7", "cc-1")
    assert nonzero(view) == {"model": 6.0, "tool": 5.0, "client": 60.0}
    assert view.seconds(inferred_only=True)["model"] == pytest.approx(6.0)
    main = [event for event in starts(log) if event.session == "cc-1"]
    assert [event.prompt_tokens for event in main] == [100, 145, 155, 165]
    outputs = [event.output_tokens for event in ends(log) if event.session == "cc-1"]
    assert outputs == [40, 8, 3, 2]
    assert main[1].messages == [{"role": "tool", "tool_call_id": "t1", "content": "a b"}]
    assert main[3].messages == [{"role": "user", "content": "thanks"}]
    assert [call.error is None for call in view.tools] == [True, False]
    assert kept(log) == [{"type": "summary", "summary": "a made-up session", "leafUuid": "u9"}]


def test_mini_swe_agent_with_stamps() -> None:
    log, (view,) = read("mini_v2.traj.json")
    assert view.target == "tiny"
    assert nonzero(view) == {"model": 3.0, "tool": 3.0}
    assert view.tools[0].exit_code == 2
    assert [(e.prompt_tokens, e.cached_tokens) for e in starts(log)] == [(50, 32), (70, None)]
    assert len(kept(log)) == 2


def test_mini_swe_agent_without_stamps() -> None:
    _, (view,) = read("mini_v1.traj.json")
    assert nonzero(view) == {"model": 4.0}
    assert view.turns[0].includes_tools
    assert view.tools[0].name == "bash"


def test_mini_swe_agent_with_answers_of_the_responses_api() -> None:
    answer = (
        '{"object":"response","created_at":1000,"completed_at":1012,"usage":{"input_tokens":100,'
        '"input_tokens_details":{"cached_tokens":25},"output_tokens":40},"output":[{"type":"message","content":'
        '[{"type":"output_text","text":"hi"}]},{"type":"function_call","call_id":"k","name":"bash","arguments":"{}"}]}'
    )
    text = (
        '{"trajectory_format":"mini-swe-agent-1.1","messages":[{"role":"user","content":"go"},'
        + answer
        + ',{"type":"function_call_output","call_id":"k","output":"fine"}]}'
    )
    log = loads(Document.of(text.encode()))
    (start,), (end,) = starts(log), ends(log)
    assert (start.prompt_tokens, start.cached_tokens, end.output_tokens) == (100, 25, 40)
    assert end.t - start.t == pytest.approx(12.0)
    assert end.message is not None
    assert end.message["content"] == "hi"


def test_swe_agent() -> None:
    log, (view,) = read("swe_agent.traj")
    assert (view.clock, view.target) == ("durations", "tiny")
    assert nonzero(view) == {"tool": 1.75}
    assert view.seconds(inferred_only=True)["tool"] == 0
    assert [message["role"] for message in starts(log)[0].messages or []] == ["system", "user"]
    (rest,) = kept(log)
    assert isinstance(rest, dict)
    assert rest["info"]["model_stats"]["tokens_sent"] == 500


def test_foreign_atif() -> None:
    log, (view, child) = read("atif.json")
    assert (view.session, child.session, child.parent) == ("root", "child", "root")
    assert nonzero(view) == {"model": 6.0}
    assert all(turn.includes_tools for turn in view.turns)
    first, *_ = starts(log)
    assert (first.prompt_tokens, first.cached_tokens, first.new_tokens) == (100, 40, 60)
    assert [call.name for call in view.tools] == ["worker", "shell"]
    raws = kept(log)
    assert {"content": "system event"} in raws
    assert any(isinstance(raw, dict) and raw.get("source") == "oracle" for raw in raws)


def test_workload_with_stamps() -> None:
    _, (one, two, three) = read("workload.csv")
    assert nonzero(one) == {"model": 8.0, "tool": 6.0, "client": 60.0}
    assert [turn.cached_tokens for turn in one.turns] == [0, 1984, 2048, 2112]
    assert nonzero(two) == {"model": 2.0, "tool": 9.0}
    assert nonzero(three) == {"model": 1.0, "tool": 9.0}


def test_workload_of_durations() -> None:
    log, (one, two) = read("tracelab.csv")
    assert one.clock == "durations"
    assert nonzero(one) == {"tool": 2.5}
    assert two.wall == 0.0
    assert kept(log)[0] == {"turn": 0, "family": "a"}


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("session_id,round_idx,output_len\ns,0,1\n", "prefix_len"),
        ("session_id,round_idx,prefix_len,input_len,output_len\ns,0,1,x,1\n", "input_len"),
        ("session_id,round_idx,prefix_len,input_len,output_len\ns,0,1,-4,1\n", "input_len"),
        ("session_id,round_idx,prefix_len,input_len,output_len\ns,nan,1,4,1\n", "round_idx"),
    ],
)
def test_bad_workloads_name_row_and_column(text: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        loads(Document.of(text.encode()))
    assert caught.value.param == param


def test_openai_requests_that_continue_share_a_session() -> None:
    log, (one, other) = read("openai_chat.jsonl")
    assert (one.session, other.session) == ("one", "chat2")
    assert [event.session for event in starts(log)] == ["one", "one", "chat2"]
    assert starts(log)[0].cached_tokens == 16
    assert starts(log)[1].messages == [{"role": "tool", "tool_call_id": "k", "content": "a b"}]
    assert ends(log)[0].request_id == "resp-1"
    assert kept(log) == [{"id": "one", "elapsed": 1}]
    assert one.clock == "none"


def test_openai_messages() -> None:
    log, (view,) = read("openai_messages.json")
    assert len(view.turns) == 1
    assert kept(log) == [{"role": "narrator", "content": "?"}]


def test_a_bad_time_is_named() -> None:
    text = (DATA / "pi.jsonl").read_text().replace("2026-03-01T10:00:08.100Z", "yesterday")
    with pytest.raises(InvalidRequest, match="'yesterday'"):
        loads(Document.of(text.encode()))


def test_cut_foreign_lines_are_reported() -> None:
    log = loads(Document.of((DATA / "pi.jsonl").read_bytes()[:-30]))
    assert log.problems == ["line 8: not JSON, kept out"]
