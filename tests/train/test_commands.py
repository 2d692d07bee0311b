"""From a folder of sources to a measured drafter, on a tiny target folder: plan, build, train, evaluate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.commands import build_corpus, evaluate, plan_corpus, train
from dlite_agent.train.data import Plan
from dlite_agent.train.store import open_shards
from tests.helpers import relative_error
from tests.train.conftest import CONFIG, tiny_weights
from tests.train.test_recorded import turns, write_log

VOCAB = 264
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    unused = [f"<|unused{i}|>" for i in range(VOCAB - len(letters) - len(special))]
    vocab = {token: i for i, token in enumerate([*special, *letters, *unused])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(str(folder))
    config = {**CONFIG, "vocab_size": VOCAB, "max_position_embeddings": 2048, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(VOCAB), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for i in range(24):
        text = "\n".join(f"def task_{i}_{j}(x):\n    return x * {i * j}" for j in range(8))
        (folder / f"file{i}.py").write_text(text)
    return folder


def test_a_drafter_is_planned_built_trained_and_measured(model: Path, sources: Path, tmp_path: Path) -> None:
    target, corpus = str(model), tmp_path / "corpus"
    log = write_log(tmp_path / "log.jsonl", *turns("s", (0, [9, 8, 7], [6, 5]), (5, [40, 41], [42]), target=target))
    plan = Plan(roots=(str(sources),), sources=24, recorded=(str(log),), held_out_share=0.2, with_questions=False)
    manifest = plan_corpus(corpus, plan, target=target)
    assert manifest["splits"]["train"] > manifest["splits"]["held_out"] > 0
    built = build_corpus(corpus, target=target, taps=3, max_new=12, max_prompt=900, slots=6)["built"]
    shards = open_shards(corpus / "train")
    assert sum(len(shard.conversations) for shard in shards) == built["train"]["conversations"] > 5
    assert built["train"]["digests"] == {shard.name: shard.digest() for shard in shards}
    assert sum(side["kinds"].get("session", 0) for side in built.values()) == 1
    everything = [*shards, *open_shards(corpus / "held_out")]
    (recorded,) = (
        shard.conversation(i)
        for shard in everything
        for i, labels in enumerate(shard.conversations)
        if labels.source == "session: s"
    )
    assert recorded.ids.tolist() == [9, 8, 7, 6, 5, 40, 41, 42]
    assert recorded.spans == ((3, 5), (7, 8))
    with pytest.raises(InvalidRequest, match="no switch for thinking"):
        plan_corpus(tmp_path / "other", replace(plan, thinking_share=0.5), target=target)

    config = tmp_path / "run.toml"
    config.write_text(
        f'target = "{target}"\ncache = "{corpus / "train"}"\nheld_out = "{corpus / "held_out"}"\n'
        f'text_counts = "{corpus / "id_counts.npy"}"\nmask_token_id = 263\nsteps = 30\nbatch = 16\n'
        "evaluate_steps = 15\n[shape]\ndepth = 1\ntaps = 3\nrank = 8\ndraft_vocab = 128\n[optimizer]\nwarmup = 3\n"
    )
    rows: list[dict[str, object]] = []
    card = train(config, tmp_path / "run", rows.append)
    assert card["steps"] == 30
    assert sum("held_out_tau" in row for row in rows) == 2
    assert card["tau"] == rows[-1]["held_out_tau"]
    assert card["acceptance"] == rows[-1]["held_out_rates"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    _torchrun_gives_the_same(config, tmp_path / "run", tmp_path / "two")

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": f"{kind}-1", "messages": [{"role": "user", "content": f"{kind} {'ab' * 9}"}]}) + "\n"
            for kind in ("edit", "log")
        )
    )
    found = evaluate(str(tmp_path / "run" / "drafter"), prompts, target=target, dtype="fp32", max_new=16)
    groups = {(row["by"], row["group"]): row for row in found.rows()}
    assert groups.keys() >= {("all", "everything"), ("prompt", "edit"), ("prompt", "log"), ("context", "under 512")}
    assert 1 <= groups["all", "everything"]["tau"] <= 8
    assert found.speed()["speedup"] > 0
    assert found.speed()["tau"] == pytest.approx(groups["all", "everything"]["tau"], abs=1e-3)
    with pytest.raises(InvalidRequest, match="no shipped drafter fits"):
        evaluate("auto", prompts, target=target, dtype="fp32")


def _torchrun_gives_the_same(config: Path, alone: Path, folder: Path) -> None:
    """The command of docs/training.md, two processes on one machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dlite_agent.cli", "train", "run", str(config), str(folder)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1])["steps"] == 30
    wanted, found = (load_file(path / "drafter" / "model.safetensors") for path in (alone, folder))
    for name, tensor in wanted.items():
        assert relative_error(found[name].float(), tensor.float()) < 1e-2, name
