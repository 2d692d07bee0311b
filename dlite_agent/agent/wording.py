"""What the loop says to the model: instructions, tool results, and errors it can act on."""

from __future__ import annotations

from dlite_agent.agent.bundles import ToolOutcome

INSTRUCTIONS = (
    "You are an agent that works on a repository in the current folder. Use the tools to look, change and test; paths "
    "are relative to that folder. Work in small steps, one purpose a call. When the task is done, call submit."
)
INSTRUCTIONS_WITHOUT_SUBMIT = (
    "You are an agent that works on a repository in the current folder. Use the tools to look, change and test; paths "
    "are relative to that folder. When the task is done, say what you found or did."
)
INTERRUPTED = (
    "The server was restarted while this call ran, and the call did not finish. What it had changed so far may remain; "
    "check before calling it again."
)
STOPPED = "The call was ended because the run's tool seconds are used up."
CUT_ANSWER = "Your answer was cut off at its token limit. Go on with a tool call."


def result(outcome: ToolOutcome) -> str:
    """A tool's result: its output, then how it ended where that was not simply well."""
    parts = [outcome.output.rstrip("\n")] if outcome.output.strip() else []
    if outcome.note:
        parts.append(outcome.note)
    elif outcome.exit_code != 0:
        parts.append(f"[exit code {outcome.exit_code}]")
    return "\n".join(parts) or "[no output]"


def invalid(problem: str) -> str:
    """The answer to a call that does not fit."""
    return f"Invalid call: {problem} Nothing was run; correct the call and send it again."


def cut_call(tokens: int) -> str:
    """The answer to a call that its turn's limit cut short."""
    return invalid(f"it was cut off at the limit of {tokens} tokens a turn.")
