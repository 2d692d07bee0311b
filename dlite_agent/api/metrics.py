"""Prometheus metrics, under vLLM's names where it has one, so that existing dashboards work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric

from dlite_agent.decode.engine import Engine
from dlite_agent.decode.jobs import TurnFigures
from dlite_agent.session.persist import Persister
from dlite_agent.session.store.disk import DiskStore
from dlite_agent.session.tiers import Tiers

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_TOKENS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
_FIGURES = re.compile(r": (match|sure) of .*")
"""What a round's label says in numbers; a label of a metric must be one of few."""


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(engine))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self.registry)

        self.finished = counter("vllm:request_success", "Requests answered.", "finished_reason")
        self.failed = counter("dlite:request_failures", "Requests that ended without an answer.", "code")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.")
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        self.queried = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in sessions' KV.")
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self.tier_hits = counter("dlite:tier_hits", "Turns whose KV was restored.", "tier")
        self.committing = histogram("dlite:commit_seconds", "Making a turn durable, before its response ends.")
        self.restored = counter("dlite:restored_tokens", "Prompt tokens whose KV was restored.", "tier")
        self.divergences = counter("dlite:divergences", "Turns that did not simply continue.", "reason")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds with drafts.")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self.rounds = counter("dlite:rounds", "Rounds by what was drafted, and why nothing was.", "source")
        self.parts = counter("dlite:decode_seconds", "Seconds of rounds, a turn's own view.", "part")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.per_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Mean seconds a token after the first, by request.",
            (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = histogram("vllm:request_queue_time_seconds", "In the queue.")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From KV to the first token.")
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first to the last token.")
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "Generated tokens.", _TOKENS)

    def watch(self, tiers: Tiers, persister: Persister | None) -> None:
        """Show where sessions are, too."""
        self.registry.register(_TierGauges(tiers, persister))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def answered(self, figures: TurnFigures, tokens: int, reason: str) -> None:
        """Count a turn that was answered with `tokens` tokens."""
        first = figures.finished if figures.first_token is None else figures.first_token
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(figures.prompt_tokens)
        self.generated.inc(tokens)
        self.queried.inc(figures.prompt_tokens)
        self.hits.inc(figures.cached_tokens)
        self.tier_hits.labels(figures.tier).inc()
        self.restored.labels(figures.tier).inc(figures.cached_tokens)
        self.committing.observe(figures.committed)
        for row in figures.rounds:
            self.drafts.inc(row.drafted > 0)
            self.drafted.inc(row.drafted)
            self.accepted.inc(row.advance - 1)
            self.rounds.labels(_FIGURES.sub("", row.source)).inc()
            for part, seconds in (("draft", row.t_d), ("verify", row.t_v), ("rest", row.t_s)):
                self.parts.labels(part).inc(seconds)
        self.first_token.observe(first - figures.queued)
        if tokens > 1:
            self.per_token.observe((figures.finished - first) / (tokens - 1))
        self.whole.observe(figures.finished - figures.queued)
        self.queue.observe(figures.admitted - figures.queued)
        self.prefill.observe(first - figures.restored)
        self.decode.observe(figures.finished - first)
        self.prompt_size.observe(figures.prompt_tokens)
        self.answer_size.observe(tokens)


class _EngineGauges:
    """What the engine can say at any time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, (waiting, tokens) = self._engine.stats, self._engine.waiting()
        share = stats.kv_reserved / stats.kv_capacity if stats.kv_capacity else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", "Turns in the batch.", stats.running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Turns in the queue.", waiting)
        yield GaugeMetricFamily("dlite:queued_tokens", "Prompt tokens in the queue.", tokens)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV budget that is reserved.", share)
        yield GaugeMetricFamily("dlite:kv_positions_reserved", "KV positions reserved.", stats.kv_reserved)
        yield GaugeMetricFamily("dlite:kv_positions", "KV positions there are.", stats.kv_capacity)
        yield GaugeMetricFamily("dlite:session_states", "Sessions known to the engine.", stats.states)
        yield CounterMetricFamily("dlite:steps", "Steps of the engine.", stats.steps)
        yield CounterMetricFamily("vllm:num_preemptions", "Turns sent back to the queue for memory.", stats.preemptions)
        yield CounterMetricFamily("dlite:evictions", "Idle sessions whose KV was dropped for memory.", stats.evictions)


class _TierGauges:
    """Where sessions are between their turns, and what moved them."""

    def __init__(self, tiers: Tiers, persister: Persister | None) -> None:
        self._tiers = tiers
        self._persister = persister

    def collect(self) -> Iterator[Metric]:
        tiers, moves = self._tiers, dict(self._tiers.retention.counts)
        held = GaugeMetricFamily("dlite:tier_bytes", "Bytes of paused sessions.", labels=["tier"])
        held.add_metric(["device"], tiers.paused_bytes())
        held.add_metric(["host"], tiers.host.bytes)
        if self._persister is not None and isinstance(self._persister.local, DiskStore):
            held.add_metric(["disk"], self._persister.local.bytes)
        yield held
        yield CounterMetricFamily("dlite:spills", "Sessions copied to host memory.", tiers.counts["spills"])
        yield CounterMetricFamily("dlite:spilled_bytes", "Bytes copied to host memory.", tiers.counts["spilled_bytes"])
        left = CounterMetricFamily("dlite:tier_moves", "Paused sessions that left a tier.", labels=["tier", "cause"])
        fetched = CounterMetricFamily("dlite:prefetches", "Prefetched sessions.", labels=["outcome"])
        for name, count in sorted(moves.items()):
            tier, cause = name.split(".")
            if tier == "prefetch":
                fetched.add_metric([cause], count)
            else:
                left.add_metric([tier, cause], count)
        yield left
        yield fetched
        counts = {} if self._persister is None else dict(self._persister.counts)
        for what, text in (("read_bytes", "Bytes read from stores."), ("written_bytes", "Bytes written to stores.")):
            family = CounterMetricFamily(f"dlite:store_{what}", text, labels=["tier"])
            for name, count in sorted(counts.items()):
                if name.endswith(f".{what}"):
                    family.add_metric([name.split(".")[0]], count)
            yield family
