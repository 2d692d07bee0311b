"""The `usage` of a response: token counts in each API's words, and our own block with phases and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlite_agent.api.turns import Answer, Run


def dlite_block(run: Run, answer: Answer) -> dict[str, Any]:
    """What became of a turn.

    Seconds are of its own clock: queue, restore, prefill and decode add up to the whole. `tau` is the mean advance of
    its rounds (accepted drafts + 1), None when there was none. Draft, verify and rest are parts of decode.
    """
    figures = answer.figures
    first = figures.finished if figures.first_token is None else figures.first_token
    early = sum(end - begin for begin, end in figures.waits if begin < first)
    late = sum(end - begin for begin, end in figures.waits if begin >= first)
    rounds = figures.rounds
    advance = sum(row.advance for row in rounds)
    block: dict[str, Any] = {
        "session_id": run.session.id,
        "turn": run.turn,
        "mode": figures.mode,
        "finish": answer.reason,
        "queue_seconds": round(figures.admitted - figures.queued + early + late, 6),
        "restore_seconds": round(figures.restored - figures.admitted, 6),
        "prefill_seconds": round(first - figures.restored - early, 6),
        "decode_seconds": round(figures.finished - first - late, 6),
        "draft_seconds": round(sum(row.t_d for row in rounds), 6),
        "verify_seconds": round(sum(row.t_v for row in rounds), 6),
        "rest_seconds": round(sum(row.t_s for row in rounds), 6),
        "rounds": len(rounds),
        "tau": round(advance / len(rounds), 4) if rounds else None,
        "drafted_tokens": sum(row.drafted for row in rounds),
        "accepted_tokens": advance - len(rounds),
        "restored_tokens": figures.cached_tokens,
        "restored_from": figures.tier,
        "restore_reason": figures.reason,
        "prefilled_tokens": sum(chunk.tokens for chunk in figures.prefills),
        "preemptions": figures.preemptions,
        "divergence": run.divergence,
    }
    if run.warnings:
        block["warnings"] = run.warnings
    return block


def openai_usage(run: Run, answers: Sequence[Answer]) -> dict[str, Any]:
    """`usage` of chat and text completions."""
    first = answers[0]
    prompt, completion = len(run.prompt_ids), sum(answer.tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": first.figures.cached_tokens},
        "dlite": dlite_block(run, first),
    }
