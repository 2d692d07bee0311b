"""Sources, prompts and plans: what is refused, what is deterministic, and that no source is on both sides."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.data import Plan, Request, make_plan, read_plan, read_prompts, write_plan
from dlite_agent.train.prompts import BUILDERS, excerpt, prompt_about
from dlite_agent.train.questions import SUBJECTS, questions, tracebacks
from dlite_agent.train.sources import Source, held_out, kind_of, read_source, scan

CODE = "\n".join(f"def handler_{i}(value):\n    return value + {i}\n" for i in range(20))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for i in range(40):
        file = root / f"pkg{i % 4}" / f"mod{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE + f"# module {i}\n")
    (root / "README.md").write_text("A readme about nothing in particular. " * 20)
    (root / "data.json").write_text(json.dumps({f"key{i}": i for i in range(60)}, indent=1))
    (root / "run.log").write_text("INFO started\nERROR failed to open port 80\n" * 10)
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00" * 200)
    (root / "short.txt").write_text("too short")
    (root / "guide.txt.gz").write_bytes(gzip.compress(b"A guide to the guide, in many words. " * 20))
    return root


def test_a_folder_yields_its_text_files_and_passes_over_the_rest(tree: Path) -> None:
    sources = scan([tree], limit=100, seed=1)
    keys = {source.key for source in sources}
    assert len(keys) == len(sources) == 44
    assert {"README.md", "guide.txt.gz", "data.json", "run.log"} <= keys
    assert not {"binary.txt", "short.txt"} & keys
    assert [s.key for s in scan([tree], limit=100, seed=1)] == [s.key for s in sources]
    assert [s.key for s in scan([tree], limit=5, seed=1)] == [s.key for s in sources[:5]]
    assert [s.key for s in scan([tree], limit=100, seed=2)] != [s.key for s in sources]


def test_the_same_text_twice_is_one_source(tree: Path) -> None:
    (tree / "copy.py").write_text((tree / "pkg0" / "mod0.py").read_text().replace("\n", "\n\n"))
    assert len(scan([tree], limit=100, seed=1)) == 44


def test_unreadable_empty_and_unknown_sources_are_refused_by_name(tree: Path) -> None:
    for name, match in (("binary.txt", "cannot be read as UTF-8"), ("short.txt", "empty or under")):
        with pytest.raises(InvalidRequest, match=match) as refusal:
            scan([tree / name], limit=9, seed=0)
        assert name in refusal.value.message
    (tree / "torn.log.gz").write_bytes(gzip.compress(b"x" * 500)[:-9])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_source(tree / "torn.log.gz", "torn")
    with pytest.raises(InvalidRequest, match="no known kind"):
        read_source(tree / "image.png", "image")
    with pytest.raises(InvalidRequest, match="does not exist"):
        scan([tree / "absent"], limit=9, seed=0)
    (tree / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="holds no file"):
        scan([tree / "empty"], limit=9, seed=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.py", "code"), ("x.JSON", "data"), ("METADATA", "prose"), ("y.log.gz", "log"), ("z.bin", None)],
)
def test_kinds_go_by_name(name: str, kind: str | None) -> None:
    assert kind_of(Path(name)) == kind


def test_every_builder_makes_messages_that_end_with_a_question_or_a_tool_output() -> None:
    seen = set()
    for kind, builders in BUILDERS.items():
        assert abs(sum(share for share, _ in builders.values()) - 1) < 1e-9
        for seed in range(60):
            prompt = prompt_about(Source(f"pkg/mod.{kind}", kind, CODE), seed=seed)
            seen.add((kind, prompt.kind))
            assert prompt.messages[-1]["role"] in ("user", "tool")
            assert all(message["content"] for message in prompt.messages)
            assert prompt == prompt_about(Source(f"pkg/mod.{kind}", kind, CODE), seed=seed)
    assert seen == {(kind, name) for kind, builders in BUILDERS.items() for name in builders}


def test_an_excerpt_keeps_whole_lines_within_its_budget() -> None:
    import random

    for seed in range(50):
        text = excerpt(CODE, random.Random(seed), largest=600)
        assert text in CODE
        assert len(text) <= 600


def test_tracebacks_are_real_and_name_their_program() -> None:
    traces = tracebacks(60, seed=3)
    assert len(traces) > 50
    assert all(trace.kind == "log" and trace.text.startswith("$ python ") for trace in traces)
    assert any("json.decoder.JSONDecodeError" in trace.text for trace in traces)
    assert any("RecursionError" in trace.text for trace in traces)
    assert not any("dlite_agent" in trace.text for trace in traces)


def test_a_plan_puts_every_source_on_one_side_and_repeats_exactly(tree: Path, tmp_path: Path) -> None:
    plan = Plan(roots=(str(tree),), sources=100, seed=4, held_out_share=0.2, traces=20)
    requests = make_plan(plan)
    sides = {side: {r.source for r in requests if r.split == side} for side in ("train", "held_out")}
    assert sides["train"]
    assert sides["held_out"]
    assert not sides["train"] & sides["held_out"]
    assert len({r.id for r in requests}) == len(requests)
    assert all(r.temperature == 0 for r in requests if r.split == "held_out")
    greedy = sum(r.temperature == 0 for r in requests if r.split == "train") / sum(r.split == "train" for r in requests)
    assert 0.5 < greedy < 0.7
    assert len([r for r in requests if r.source.startswith("question: ")]) == len(questions(seed=4)) > len(SUBJECTS)

    manifest = write_plan(tmp_path / "corpus", plan, requests)
    assert manifest["requests"] == len(requests) == sum(manifest["splits"].values())
    assert read_plan(tmp_path / "corpus") == requests == make_plan(plan)
    assert str(tree) not in (tmp_path / "corpus" / "manifest.json").read_text()


def test_a_corpus_folder_is_not_overwritten_nor_read_when_changed(tree: Path, tmp_path: Path) -> None:
    plan = Plan(roots=(str(tree),), sources=9, with_questions=False)
    write_plan(tmp_path / "c", plan, make_plan(plan))
    other = Plan(roots=(str(tree),), sources=9, seed=1, with_questions=False)
    with pytest.raises(InvalidRequest, match="holds another corpus"):
        write_plan(tmp_path / "c", other, make_plan(other))
    with (tmp_path / "c" / "plan.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(InvalidRequest, match="does not match its manifest"):
        read_plan(tmp_path / "c")
    with pytest.raises(InvalidRequest, match="is not a corpus"):
        read_plan(tmp_path)


def test_a_plan_without_training_sources_is_refused(tree: Path) -> None:
    with pytest.raises(InvalidRequest, match="no source is left for training"):
        make_plan(Plan(roots=(str(tree),), sources=9, held_out_share=1.0))


def test_sides_are_decided_by_the_key_alone() -> None:
    share = sum(held_out(f"key {i}", 0.1) for i in range(2000)) / 2000
    assert 0.08 < share < 0.12
    assert all(held_out(f"key {i}", 0.3) for i in range(500) if held_out(f"key {i}", 0.1))


def test_prompt_files_are_read_and_faults_name_their_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    good = {"id": "edit-01", "messages": [{"role": "user", "content": "hi"}]}
    file.write_text(json.dumps(good) + "\n")
    assert read_prompts(file) == [Request("edit-01", "held_out", "prompts: edit-01", "edit", 0.0, good["messages"])]  # type: ignore[arg-type]
    file.write_text(json.dumps(good) + '\n{"id": 3}\n')
    with pytest.raises(InvalidRequest, match="line 2 is not a prompt"):
        read_prompts(file)
    file.write_text("")
    with pytest.raises(InvalidRequest, match="no prompts"):
        read_prompts(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_the_held_out_prompts_of_this_project_are_sixty_of_twelve_kinds() -> None:
    prompts = read_prompts(Path(__file__).parent.parent / "data" / "heldout_prompts.jsonl")
    kinds = [prompt.kind for prompt in prompts]
    assert len(prompts) == 60
    assert len(set(kinds)) == 12
    assert sum(message["role"] == "tool" for prompt in prompts for message in prompt.messages) == 5
