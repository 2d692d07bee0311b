from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.trace.events import Note, Segment, ToolEnd, TurnEnd, TurnStart, Unknown
from dlite_agent.trace.log import EventLog, dump_lines, parse_lines, read_log
from dlite_agent.trace.redact import MARK, Redactor
from tests.trace import sample


def test_written_events_are_read_back_after_their_segment(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with EventLog(path) as writer:
        for event in sample.events()[1:]:
            writer.write(event)
    found = read_log(path)
    assert isinstance(found.events[0], Segment)
    assert found.events[0].segment == writer.segment
    assert found.events[1:] == sample.events()[1:]
    assert (found.cut_bytes, found.problems) == (0, [])
    assert found.sessions() == ["s"]


def test_a_half_written_last_line_is_cut_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    whole = dump_lines(sample.events())
    path.write_text(whole[:-25])
    assert read_log(path).cut_bytes > 0
    with EventLog(path) as writer:
        assert writer.cut_bytes > 0
    found = read_log(path)
    assert (found.cut_bytes, found.problems) == (0, [])
    assert found.events[:-1] == sample.events()[:-1]
    assert isinstance(found.events[-1], Segment)


def test_a_long_half_written_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    whole = dump_lines(sample.events()[:2])
    path.write_text(whole + '{"kind":"note","text":"' + "x" * 200_000)
    with EventLog(path) as writer:
        assert writer.cut_bytes == 200_023
    assert read_log(path).events[:-1] == sample.events()[:2]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(dump_lines(sample.events())[:-1])
    with EventLog(path) as writer:
        assert writer.cut_bytes == 0
    assert read_log(path).events[:-1] == sample.events()


def test_broken_and_unknown_lines_are_reported_and_kept() -> None:
    text = dump_lines(sample.events()[:2]) + '{"kind":"gate","t":1}\nnot json\n[1]\n' + dump_lines(sample.events()[2:])
    found = parse_lines(text.encode())
    kept = [event for event in found.events if isinstance(event, Unknown)]
    assert [event.raw for event in kept] == [{"kind": "gate", "t": 1}, {"value": [1]}]
    assert [problem.split(":")[0] for problem in found.problems] == ["line 3", "line 4", "line 5"]
    assert [event for event in found.events if not isinstance(event, Unknown)] == sample.events()


def test_nesting_without_end_is_no_crash() -> None:
    found = parse_lines(b"[" * 200_000 + b"\n" + dump_lines(sample.events()).encode())
    assert found.events == sample.events()
    assert found.problems[0].startswith("line 1: not JSON")


def test_odd_content_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    output = ["lone \ud800", "\x00\x1b[31m", float("nan"), b"raw", {1: "é"}]
    with EventLog(path) as writer:
        writer.write(ToolEnd(segment=writer.segment, t=1.0, session="s", turn=0, call_id="c", output=output))
    event = read_log(path).events[1]
    assert isinstance(event, ToolEnd)
    assert event.output == ["lone \ud800", "\x00\x1b[31m", "nan", "b'raw'", {"1": "é"}]


def test_content_off_keeps_figures_only(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with EventLog(path, content=False) as writer:
        for event in sample.events()[1:]:
            writer.write(event)
    text = path.read_text()
    assert "looking" not in text
    assert "bubblewrap" in text
    assert '"output_ids"' not in text


def test_ids_go_where_redaction_changed_their_text(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    secret = "sk-" + "a1" * 12
    clean, dirty = ({"role": "user", "content": text} for text in ("hello", f"use {secret}"))
    with EventLog(path, redactor=Redactor()) as writer:
        for turn, messages in enumerate(([clean], [clean, dirty], None)):
            writer.write(
                TurnStart(segment=writer.segment, t=1.0, session="s", turn=turn, messages=messages, new_ids=[turn, 7])
            )
        writer.write(TurnEnd(segment=writer.segment, t=2.0, session="s", turn=0, error=f"bad {secret}", output_ids=[1]))
    assert secret not in path.read_text()
    starts = [event for event in read_log(path).events if isinstance(event, TurnStart)]
    assert [event.new_ids for event in starts] == [[0, 7], None, None]
    assert starts[1].messages == [clean, {"role": "user", "content": f"use {MARK}"}]
    end = read_log(path).events[-1]
    assert isinstance(end, TurnEnd)
    assert (end.error, end.output_ids) == (f"bad {MARK}", None)


def test_threads_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with EventLog(path) as writer:

        def work(name: str) -> None:
            for i in range(50):
                writer.write(Note(segment=writer.segment, t=float(i), text=name * 200))

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_log(path)
    assert (len(found.events), found.problems) == (201, [])


def test_a_closed_log_refuses(tmp_path: Path) -> None:
    writer = EventLog(tmp_path / "s.jsonl")
    writer.close()
    with pytest.raises(InvalidRequest, match="closed"):
        writer.write(Note(segment="g", t=0.0, text="late"))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"'none\.jsonl'"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequest, match="Cannot append"):
        EventLog(tmp_path / "no" / "s.jsonl")


def test_one_session_of_a_log() -> None:
    both = parse_lines(dump_lines([*sample.events("a"), *sample.events("b")[1:]]).encode())
    assert both.sessions() == ["a", "b"]
    assert both.of_session("b").events == sample.events("b")
    with pytest.raises(NotFound, match="it has a, b"):
        both.of_session("c")
