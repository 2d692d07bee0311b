"""The benchmarks of decoding on tiny models: what they print is what was decoded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlite_agent.bench.batch import bench_batch
from dlite_agent.bench.decode import known_modes, modes_of
from dlite_agent.bench.floor import bench_floor
from dlite_agent.bench.gate import bench_gate, plot_gate
from dlite_agent.bench.peers import Ours, PeerFailed, Process, bench_peers, read_peers
from dlite_agent.config import Mode
from dlite_agent.decode.load import Runtime
from dlite_agent.decode.rounds import Decoder
from dlite_agent.errors import InvalidRequest
from dlite_agent.model import native
from dlite_agent.model.linear import Precision
from dlite_agent.tables import batch_bench_table, floor_bench_table, gate_bench_table, peers_bench_table
from dlite_agent.trace.phases import Timeline
from dlite_agent.trace.script import RecordedTurn, Script
from dlite_agent.train.data import Request
from tests.bench.test_restore import Characters
from tests.helpers import load_tiny, make_drafter, pool_for, prompt, save_model, successor_drafter, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [
    Request(str(i), "held_out", "test", "test", 0.0, [{"role": "user", "content": "ab" * (9 + i)}]) for i in range(3)
]
MODES: tuple[Mode, ...] = ("ar", "dlite", "suffix", "mixed")


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    target = load_tiny(save_model(tiny_model("llama"), tmp_path))
    return Runtime(Decoder(target, successor_drafter(target), pool_for(target)), Characters(), tmp_path)


def test_batches_decode_the_same_tokens_in_every_mode(runtime: Runtime) -> None:
    free = runtime.decoder.pool.free
    result = bench_batch(runtime, PROMPTS, sizes=[1, 4], modes=MODES, new_tokens=10, repeats=2)
    assert [row["batch"] for row in result["rows"]] == [1, 4]
    for row in result["rows"]:
        assert all(found["same_tokens"] for found in row["modes"].values())
        assert row["modes"]["ar"]["speedup"] == 1.0
        assert row["modes"]["ar"]["tau"] == 1.0
        assert row["modes"]["dlite"]["tau"] > 1.0
    assert batch_bench_table(result).row_count == 8
    assert runtime.decoder.pool.free == free


def test_the_gate_records_every_round_of_every_load(runtime: Runtime, tmp_path: Path) -> None:
    free = runtime.decoder.pool.free
    result = bench_gate(runtime, PROMPTS, loads=(1, 3), seconds=0.5)
    assert {row["batch"] for row in result["rounds"]} == {1, 3}
    assert [row["load"] for row in result["stretches"]] == [1, 3]
    assert sum(row["rounds"] for row in result["stretches"]) == len(result["rounds"])
    plot_gate(result, tmp_path / "gate.png")
    assert (tmp_path / "gate.png").read_bytes().startswith(b"\x89PNG")
    assert gate_bench_table(result).row_count == 2
    assert runtime.decoder.pool.free == free


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or not an AVX2 processor")
def test_the_floor_counts_the_bytes_of_the_weights(tmp_path: Path) -> None:
    precision = Precision("fp32", "native")
    target = load_tiny(save_model(tiny_model("llama"), tmp_path), precision=precision)
    drafter = make_drafter(target.spec)
    drafter.pack(precision, target.device)
    result = bench_floor(Runtime(Decoder(target, drafter, pool_for(target)), None, tmp_path), context=32, repeats=2)
    spec = target.spec
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    padded = -(-spec.vocab_size // 16) * 16 * spec.hidden_size
    assert result["target_bytes"] == 4 * (spec.num_layers * layer + padded)
    assert all(row["seconds"] > 0 and row["share"] == row["floor"] / row["seconds"] for row in result["rows"])
    assert floor_bench_table(result).row_count == 3


def test_a_floor_needs_native_kernels(runtime: Runtime) -> None:
    with pytest.raises(InvalidRequest, match="packed"):
        bench_floor(runtime, context=32)


def test_peers_take_turns_over_real_pipes(runtime: Runtime, tmp_path: Path) -> None:
    """A peer that counts upwards shares no id with ours but where ours counts as well."""
    free, counting = runtime.decoder.pool.free, tmp_path / "counting.py"
    counting.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples/peers')!r})\n"
        "from serve import serve\n"
        "print('to stderr')\n"
        "serve(lambda ids, count: (ids[-1] + i for i in range(1, count + 1)), lambda: None, version='1')\n"
    )
    script = Script(
        "s",
        [turn(1, prompt(20), 6), turn(2, prompt(40), 9), turn(3, prompt(50), 1)],
        Timeline("s", "test", "monotonic", None, 0.0, [], [], []),
    )
    ours, peer = Ours(runtime, "mixed"), Process("counting", [sys.executable, str(counting)])
    try:
        assert peer.about == {"version": "1"}
        assert peer.turn([4, 7], 3).ids == [8, 9, 10]
        result = bench_peers([ours, peer], script, repeats=2)
    finally:
        peer.close()
        ours.close()
    assert (result["turns"], result["context"], result["new_tokens"]) == (2, [20, 40], 15)
    mine, its = result["peers"]["dlite-agent mixed"], result["peers"]["counting"]
    assert mine["ours_to_it"]["token"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert mine["same_ids"] == 1.0
    assert its["same_ids"] < 1.0
    assert its["session"] >= its["decode"] > 0
    assert peers_bench_table(result).row_count == 2
    assert runtime.decoder.pool.free == free


def turn(number: int, ids: list[int], answer: int) -> RecordedTurn:
    return RecordedTurn(number, prompt_ids=ids, output_ids=[1] * answer)


def test_a_peer_that_dies_is_named() -> None:
    with pytest.raises(PeerFailed, match="broken"):
        Process("broken", [sys.executable, "-c", "print('no json')"])


def test_a_peers_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"setup\.sh"):
        read_peers(tmp_path / "peers.json")
    (tmp_path / "peers.json").write_text('["x"]')
    with pytest.raises(InvalidRequest, match="must map"):
        read_peers(tmp_path / "peers.json")


def test_modes() -> None:
    assert known_modes("mixed,ar") == ("mixed", "ar")
    assert modes_of("mixed,ar") == ("ar", "mixed")
    for bad in ("fast", "ar,ar", ""):
        with pytest.raises(InvalidRequest):
            known_modes(bad)
    with pytest.raises(InvalidRequest):
        modes_of("dlite,mixed")
