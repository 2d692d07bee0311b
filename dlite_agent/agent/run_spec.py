"""What a run is asked to do and how it may end: the task, its tools, its limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dlite_agent.config import Mode

BUNDLES = ("edit", "files", "git", "shell", "submit", "tests")
"""The bundles that ship in `tools/`."""

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Text = Annotated[str, Field(min_length=1, max_length=1 << 20)]


class _Strict(BaseModel):
    """An unknown field or a wrong type is refused, by name; lists become tuples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelOptions(_Strict):
    """How each turn is generated.

    tool_choice: `required` holds every turn to calls (the run then ends by `submit`), `auto` lets the model answer.
    argument_characters: longest string a call may hold, part of the grammar, and integers then have 32 bits; with
    `max_tokens` above what such calls need, even a tiny model cannot write a call that does not parse.
    plan: tools that the first turns must call, one a turn, for models that cannot decide what comes next; arguments
    are the model's own, and so are all turns behind the plan.
    known_paths: paths of files to look at or change can only be ones that were there when the run began, which the
    schemas list; for small workspaces and models that invent paths.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: Positive = 1024
    mode: Mode | None = None
    thinking: bool | None = None
    tool_choice: Literal["auto", "required"] = "required"
    plan: Annotated[tuple[str, ...], Field(strict=False, max_length=64)] = ()
    parallel_tool_calls: bool = True
    argument_characters: Annotated[int, Field(ge=8, le=4096)] | None = None
    known_paths: bool = False


class RunLimits(_Strict):
    """Bounds of a whole run, and of each of its tool calls.

    turns, tokens (generated), tool_seconds (sum over calls) and seconds (wall clock, without pauses and outages) end
    the run; call_seconds, silent_seconds and output_bytes bound one call.
    """

    turns: Positive = 50
    tokens: Positive = 100_000
    tool_seconds: Seconds = 1800.0
    seconds: Seconds = 7200.0
    call_seconds: Seconds = 120.0
    silent_seconds: Seconds = 30.0
    output_bytes: Annotated[int, Field(ge=200, le=1 << 20)] = 8000


class RunSpec(_Strict):
    """One run.

    workspace: the folder the tools work in; below one of the server's roots. sandbox: a level to insist on; `plain`
    has to be allowed by the server. instructions: replaces the built-in system prompt.
    """

    task: Text
    workspace: Annotated[str, Field(min_length=1, max_length=4096)]
    bundles: Annotated[tuple[str, ...], Field(strict=False, min_length=1, max_length=32)] = BUNDLES
    hidden_tools: Annotated[tuple[str, ...], Field(strict=False, max_length=256)] = ()
    instructions: Text | None = None
    model: ModelOptions = ModelOptions()
    limits: RunLimits = RunLimits()
    sandbox: Literal["auto", "bubblewrap", "unshare", "landlock", "plain"] = "auto"
    protect_git: bool = True


class End(StrEnum):
    """Every legal way for a run to end.

    SUBMITTED: the submit tool handed in an answer. ANSWERED: the model answered without a call. The limits of
    `RunLimits` by name. CONTEXT_FULL: the next turn does not fit the model's context. INVALID_CALLS: it went on making
    calls that do not fit the schema. CANCELLED by the caller. FAILED: an error of the server's, named in `error`.
    """

    SUBMITTED = "submitted"
    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TOOL_LIMIT = "tool_limit"
    TIME_LIMIT = "time_limit"
    CONTEXT_FULL = "context_full"
    INVALID_CALLS = "invalid_calls"
    CANCELLED = "cancelled"
    FAILED = "failed"


CONTINUABLE = (End.SUBMITTED, End.ANSWERED)
"""Ends after which a follow-up message goes on with the run."""

SMALL_MODEL: Final = {"max_tokens": 320, "argument_characters": 80, "known_paths": True}
"""Options that keep a tiny model going: every call it may write fits its turn, and every path it names exists."""
SMALL_OUTPUT: Final = 1200
"""Bytes of one tool result that a tiny model's context can take many of."""
