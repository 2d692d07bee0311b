"""The paged layout that flash-attn uses, on the CPU: a plain attention with flash-attn's documented contract stands in
for the CUDA kernel, everything around it is the real thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlite_agent.decode.kv import KVPool
from dlite_agent.decode.paged_kv import PagedKVPool
from dlite_agent.errors import KVExhausted
from dlite_agent.model.flash import FlashAttention
from dlite_agent.model.linear import Precision
from dlite_agent.model.spec import ModelSpec, RopeSpec
from dlite_agent.model.target import Rows, Target

SPEC = ModelSpec(
    family="qwen3",
    num_layers=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    norm_eps=1e-6,
    max_positions=1200,
    rope=RopeSpec("default", 10000.0),
    tied_head=True,
    qk_norm=True,
    eos_ids=(1,),
)
CPU = torch.device("cpu")


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool
) -> Tensor:
    """flash_attn_with_kvcache: q [B, W, heads, D] on pages [pages, page, kv_heads, D], causal to the bottom right."""
    assert causal
    rows = []
    for query, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        keys = k_cache[table.long()].flatten(0, 1)[:length].repeat_interleave(q.shape[2] // k_cache.shape[2], 1)
        values = v_cache[table.long()].flatten(0, 1)[:length].repeat_interleave(q.shape[2] // k_cache.shape[2], 1)
        scores = torch.einsum("whd,nhd->hwn", query, keys) / q.shape[3] ** 0.5
        seen = torch.arange(length) <= length - query.shape[0] + torch.arange(query.shape[0]).unsqueeze(1)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hwn,nhd->whd", weights, values))
    return torch.stack(rows)


def random_target(seed: int) -> Target:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    weights = {"model.embed_tokens.weight": tensor(97, 32), "model.norm.weight": 1 + tensor(32)}
    for i in range(SPEC.num_layers):
        at = f"model.layers.{i}."
        for name, shape in (
            ("self_attn.q_proj", (32, 32)),
            ("self_attn.k_proj", (16, 32)),
            ("self_attn.v_proj", (16, 32)),
            ("self_attn.o_proj", (32, 32)),
            ("mlp.gate_proj", (48, 32)),
            ("mlp.up_proj", (48, 32)),
            ("mlp.down_proj", (32, 48)),
        ):
            weights[f"{at}{name}.weight"] = tensor(*shape)
        for name, size in (
            ("self_attn.q_norm", 8),
            ("self_attn.k_norm", 8),
            ("input_layernorm", 32),
            ("post_attention_layernorm", 32),
        ):
            weights[f"{at}{name}.weight"] = 1 + tensor(size)
    return Target(
        SPEC, weights, precision=Precision("fp32", "plain"), device=CPU, fingerprint="test", context_limit=1100
    )


def pool_options(target: Target, positions: int) -> dict[str, int]:
    per_position = 2 * SPEC.num_layers * SPEC.kv_size * 4
    return {"budget_bytes": positions * per_position, "max_positions": target.max_positions}


def test_paged_attention_equals_contiguous_attention_across_pages_and_ragged_batches() -> None:
    contiguous, paged = random_target(0), random_target(0)
    paged.attention = FlashAttention(paged_attention)
    plain_pool = KVPool(SPEC, dtype=torch.float32, device=CPU, **pool_options(contiguous, 4096))
    page_pool = PagedKVPool(SPEC, dtype=torch.float32, device=CPU, **pool_options(paged, 4096))
    generator = torch.Generator().manual_seed(1)
    sequences = [(plain_pool.sequence(), page_pool.sequence()) for _ in range(3)]
    for pair in sequences:
        for kv in pair:
            kv.reserve(700)
    for counts in ((250, 3, 40), (8, 8, 8), (1, 300, 1), (12, 0, 5)):
        ids = [torch.randint(97, (count,), generator=generator) for count in counts]
        chosen = [(pair, new) for pair, new in zip(sequences, ids, strict=True) if len(new)]
        expected = contiguous.forward([Rows(pair[0], new) for pair, new in chosen], tap_layers=(0, 2))
        found = paged.forward([Rows(pair[1], new) for pair, new in chosen], tap_layers=(0, 2))
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.taps, expected.taps, rtol=1e-4, atol=1e-5)
        for pair in sequences:  # a round's end: some drafts are rejected
            for kv in pair:
                kv.truncate(max(kv.length - 2, 1))


def test_export_load_fork_and_accounting_of_pages() -> None:
    target = random_target(2)
    target.attention = FlashAttention(paged_attention)
    pool = PagedKVPool(SPEC, dtype=torch.float32, device=CPU, **pool_options(target, 2048))
    kv = pool.sequence()
    kv.reserve(600)
    assert pool.reserved == 768
    target.forward([Rows(kv, torch.arange(300) % 97)])
    copy = kv.fork()
    assert copy.length == 300
    torch.testing.assert_close(copy.export(), kv.export())
    new = torch.tensor([5, 6, 7])
    copy.reserve(310)
    expected = target.forward([Rows(kv, new)]).logits
    torch.testing.assert_close(target.forward([Rows(copy, new)]).logits, expected)
    kv.shrink()
    assert pool.reserved == 512 + 512
    other = pool.sequence()
    with pytest.raises(KVExhausted) as caught:
        other.reserve(1100)
    assert caught.value.param == "kv_budget"
    assert pool.reserved == 1024
    assert other.reserved == 0
    kv.free()
    copy.free()
    assert pool.free == pool.capacity == 2048
