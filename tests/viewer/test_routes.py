"""The JSON behind the page: keys and owners, pages of turns and rounds, pieces of text, and what is refused."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest

from dlite_agent.api.viewer import PAGES
from dlite_agent.api.viewer_library import _shown as read_sessions
from dlite_agent.api.viewer_view import PIECE, ROUNDS_PER_PAGE, TURNS_PER_PAGE, overview, rounds_between
from dlite_agent.trace.phases import PHASES
from tests.serving import Live
from tests.viewer.browser import headers, say, upload
from tests.viewer.sample import agent_session, hostile_session, lines

OTHER = headers("another-viewer-key")


def get(server: Live, path: str, **query: Any) -> httpx.Response:
    return server.get(f"/v1/viewer/{path}", params=query, headers=headers())


def test_the_page_needs_no_key_and_everything_it_reads_does(server: Live) -> None:
    assert server.get("/viewer/").status_code == 200
    assert server.get("/viewer").headers["location"] == "viewer/"
    for path in ("sessions", "session?ref=x", "rounds?ref=x&start=0&end=1", "content?ref=x&turn=0", "live?ref=x"):
        assert server.get(f"/v1/viewer/{path}").status_code == 401, path
    assert server.post("/v1/viewer/files", {"name": "x", "text": "y"}).status_code == 401


def test_the_page_is_served_with_a_strict_policy_and_cannot_be_left(server: Live) -> None:
    names = re.findall(r'(?:src|href)="([^"#]+)"', (PAGES / "index.html").read_text())
    imports = {name for path in PAGES.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    for name in {*names, *imports}:
        answer = server.get(f"/viewer/{name}")
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "trusted-types 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert imports - set(names) == set(), "each module is asked for at once, not when the one before has come"
    html = (PAGES / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son[a-z]+=|style=|https?://", html) == []
    again = server.get("/viewer/main.js", headers={"if-none-match": server.get("/viewer/main.js").headers["etag"]})
    assert again.status_code == 304
    for path in ("/viewer/nothing.js", "/viewer/..%2fapp.py", "/viewer/%2e%2e/api/viewer.py", "/viewer/.."):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(server.url + path)
        refused.value.close()  # it is the response, with its connection
        assert refused.value.code in (401, 404), path


def test_a_session_shows_its_own_turns_with_their_texts(server: Live) -> None:
    say(server, "What is a boundary?", "texts", max_tokens=6)
    (card,) = [one for one in get(server, "sessions").json()["sessions"] if one["name"] == "texts"]
    assert card["turns"] == 1
    view = get(server, "session", ref=card["ref"]).json()
    assert list(view["seconds"]) == list(PHASES), "the page adds up in this order"
    assert sum(view["seconds"].values()) == pytest.approx(view["wall"])
    assert view["turns"][0]["output_tokens"] == 6
    parts = get(server, "content", ref=card["ref"], turn=0).json()["parts"]
    assert any("What is a boundary?" in part["text"] for part in parts)


def test_a_later_turn_is_read_from_the_log_where_it_grew(server: Live) -> None:
    for text in ("One.", "Two.", "Three."):
        say(server, text, "growing", max_tokens=3)
        (card,) = [one for one in get(server, "sessions").json()["sessions"] if one["name"] == "growing"]
        view = get(server, "session", ref=card["ref"]).json()
        assert view["turn_count"] == card["turns"]
    assert view["turn_count"] == 3
    page = get(server, "session", ref=card["ref"], from_turn=2).json()
    assert [turn["turn"] for turn in page["turns"]] == [2]
    assert page["seconds"] == view["seconds"]


def test_sessions_and_files_of_one_key_do_not_exist_for_another(server: Live) -> None:
    say(server, "Mine.", "private", max_tokens=2)
    mine = [one["ref"] for one in get(server, "sessions").json()["sessions"] if one["name"] == "private"]
    mine.append(upload(server, "mine.jsonl", lines(agent_session("mine", turns=2, rounds=4))))
    theirs = server.get("/v1/viewer/sessions", headers=OTHER).json()["sessions"]
    assert not {one["ref"] for one in theirs} & set(mine)
    for ref in mine:
        for path in ("session", "rounds", "content"):
            query = {"ref": ref, "start": 0, "end": 1, "turn": 0}
            assert server.get(f"/v1/viewer/{path}", params=query, headers=OTHER).status_code == 404
    assert server.get("/v1/viewer/live", params={"ref": mine[0]}, headers=OTHER).status_code == 404


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("session", {"ref": "live~nothing"}, 404),
        ("session", {"ref": "file~gone~0"}, 404),
        ("session", {"ref": "file~gone~x"}, 404),
        ("session", {"ref": "file~gone~²"}, 404),
        ("session", {"ref": "shipped~../../pyproject~0"}, 404),
        ("session", {"ref": ""}, 400),
        ("session", {}, 400),
        ("rounds", {"ref": "file~gone~0", "start": "nan", "end": 1}, 400),
        ("content", {"ref": "file~gone~0", "turn": -1}, 400),
        ("sessions", {"limit": 101}, 400),
    ],
)
def test_what_is_not_there_is_refused(server: Live, path: str, query: dict[str, Any], status: int) -> None:
    answer = get(server, path, **query)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_files_that_cannot_be_read_are_refused_by_name(server: Live) -> None:
    for text, field in (("", "text"), ("   ", "text"), ("no session", "path"), ('{"kind": "note"}', "text")):
        answer = server.post("/v1/viewer/files", {"name": "f", "text": text}, headers=headers())
        assert answer.status_code == 400, text
        assert answer.json()["error"]["param"] == field
    large = server.post("/v1/viewer/files", {"name": "f", "text": "x" * (17 << 20)}, headers=headers())
    assert large.status_code == 413
    unknown = server.post("/v1/viewer/files", {"name": "f", "text": "x", "path": "/etc/passwd"}, headers=headers())
    assert unknown.status_code == 400


def test_long_texts_come_in_pieces_that_join_to_the_whole(server: Live) -> None:
    ref = upload(server, "hostile.jsonl", lines(hostile_session()))
    parts = get(server, "content", ref=ref, turn=0).json()["parts"]
    (index,) = [i for i, part in enumerate(parts) if part["length"] > 5 << 20]
    assert len(parts[index]["text"]) == PIECE
    end = get(server, "content", ref=ref, turn=0, part=index, offset=parts[index]["length"] - 7).json()
    assert end["text"] == "THE END"
    assert get(server, "content", ref=ref, turn=0, part=len(parts)).status_code == 404
    assert get(server, "content", ref=ref, turn=9).status_code == 404


def test_turns_and_rounds_travel_in_pages() -> None:
    session = agent_session("long", turns=TURNS_PER_PAGE + 20, rounds=20, tool_seconds=0.2)
    (shown,) = read_sessions(lines(session).encode())
    first = overview(shown)
    assert len(first["turns"]) == TURNS_PER_PAGE
    second = overview(shown, first["next_turn"])
    assert [turn["turn"] for turn in second["turns"]] == list(range(TURNS_PER_PAGE, TURNS_PER_PAGE + 20))
    assert second["next_turn"] is None
    whole: list[float] = []
    while True:
        page = rounds_between(shown, 0.0, shown.timeline.wall, len(whole))
        if page["count"] == 0:
            break
        assert page["count"] <= ROUNDS_PER_PAGE
        whole += page["start"]
    assert len(whole) == page["total"] == first["rounds"] > ROUNDS_PER_PAGE
    assert whole == sorted(whole)


def test_bars_are_few_and_say_how_much_of_them_is_there() -> None:
    (shown,) = read_sessions(lines(agent_session("masked", turns=6, rounds=300)).encode())
    for turn in overview(shown)["turns"]:
        assert len(turn["lanes"]) < 20, "hundreds of rounds and masks are a handful of bars"
        drawn: dict[str, float] = {}
        for index, start, end, _, share in turn["lanes"]:
            drawn[PHASES[index]] = drawn.get(PHASES[index], 0.0) + (end - start) * share
        for phase, seconds in turn["seconds"].items():
            assert drawn[phase] == pytest.approx(seconds, rel=0.02, abs=0.02), phase
