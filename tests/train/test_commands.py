"""From a folder of sources to a measured drafter, on a tiny target folder: plan, build, train, evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlite_agent.errors import InvalidRequest
from dlite_agent.train.commands import build_corpus, evaluate, plan_corpus, train
from dlite_agent.train.data import Plan
from dlite_agent.train.store import open_shards
from tests.train.conftest import CONFIG, tiny_weights

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
    plan = Plan(roots=(str(sources),), sources=24, held_out_share=0.2, with_questions=False)
    manifest = plan_corpus(corpus, plan, target=target)
    assert manifest["splits"]["train"] > manifest["splits"]["held_out"] > 0
    build_corpus(corpus, target=target, taps=3, max_new=12, max_prompt=900, slots=6)
    shards = open_shards(corpus / "train")
    assert sum(len(shard.conversations) for shard in shards) > 5

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

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": f"{kind}-1", "messages": [{"role": "user", "content": f"{kind} {'ab' * 9}"}]}) + "\n"
            for kind in ("edit", "log")
        )
    )
    found = evaluate(str(tmp_path / "run" / "drafter"), prompts, target=target, dtype="fp32", max_new=16)
    assert set(found) >= {"all", "edit", "log"}
    assert 1 <= found["all"]["tau"] <= 8
    assert sum(found["all"]["advances"]) == found["all"]["rounds"] > 0
    with pytest.raises(InvalidRequest, match="no shipped drafter fits"):
        evaluate("auto", prompts, target=target, dtype="fp32")
