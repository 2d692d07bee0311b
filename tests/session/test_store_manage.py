"""Show, verify, export and import."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.record import Refused, decode
from dlite_agent.session.restore import Loaded
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.store.manage import export, load_export, show, verify
from dlite_agent.session.store.memory import MemoryStore
from tests.session.stored import BYTES_PER_POSITION, check, facts, grow, new_state, persister, pool

IDS = [(11 * i) % 1000 for i in range(400)]


def filled(store: MemoryStore | DiskStore) -> None:
    keeper = persister(store)
    state = new_state(pool().sequence(), IDS[:300])
    keeper.hold("s")
    keeper.commit(keeper.snapshot("s", state, facts(300)))
    grow(state, IDS[300:])
    keeper.commit(keeper.snapshot("s", state, facts(300, 400, divergence="edited")))


def test_show() -> None:
    store = MemoryStore()
    filled(store)
    shown = show(store, "s")
    assert (shown.tier, shown.turns, shown.tokens, shown.kv_tokens) == ("memory", 2, 400, 399)
    assert (shown.boundaries, shown.divergence, shown.model) == ((299, 399), "edited", "target")
    assert shown.bytes["kv"] == 399 * BYTES_PER_POSITION
    with pytest.raises(NotFound):
        show(store, "t")


def test_verify_names_what_is_damaged_and_changes_nothing() -> None:
    store = MemoryStore()
    filled(store)
    assert verify(store, "s").problems == ()
    record = decode(store.load("s") or b"")
    lost, flipped = record.refs("kv")[0].key, record.refs("features")[1].key
    (frame,) = store.fetch("s", [flipped])
    assert frame is not None
    store.discard("s", [lost, flipped])
    lease = store.acquire("s", "one", 30)
    store.commit(lease, record, {flipped: frame[:-1] + bytes((frame[-1] ^ 1,))})
    verdict = verify(store, "s")
    assert verdict.blocks == len(record.blocks) - 2
    assert sorted(problem.split(":")[0] for problem in verdict.problems) == ["features 398..399", "kv 0..256"]
    assert store.held("s", [flipped]) == {flipped}


def test_a_session_travels_in_one_file(tmp_path: Path) -> None:
    source = DiskStore(tmp_path / "here")
    filled(source)
    assert export(source, "s", tmp_path / "s.session") == (tmp_path / "s.session").stat().st_size
    target = MemoryStore()
    assert load_export(target, tmp_path / "s.session", name="copy").session == "copy"
    keeper = persister(target)
    keeper.hold("copy")
    found = keeper.read("copy")
    assert isinstance(found, Loaded)
    assert found.report.reason is None
    assert check(found, IDS).boundary == 399
    with pytest.raises(InvalidRequest, match="exists") as caught:
        load_export(target, tmp_path / "s.session", name="copy")
    assert caught.value.param == "name"
    source.close()


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    source = MemoryStore()
    filled(source)
    export(source, "s", tmp_path / "s.session")
    data = (tmp_path / "s.session").read_bytes()
    for at in range(0, len(data), 211):
        damaged = bytearray(data)
        damaged[at] ^= 8
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(Refused):
            load_export(MemoryStore(), tmp_path / "bad")
    for content in (b"", b"something else"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(InvalidRequest) as caught:
            load_export(MemoryStore(), tmp_path / "bad")
        assert caught.value.param == "path"


def test_a_damaged_session_is_not_exported(tmp_path: Path) -> None:
    store = MemoryStore()
    filled(store)
    store.discard("s", [decode(store.load("s") or b"").refs("kv")[0].key])
    with pytest.raises(Refused, match="damaged"):
        export(store, "s", tmp_path / "s.session")
    assert not (tmp_path / "s.session").exists()
