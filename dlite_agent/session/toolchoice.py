"""A request's tools and `tool_choice` as a constraint on the response, in the template's way to write calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dlite_agent.decode import grammar
from dlite_agent.decode.schema import unenforced
from dlite_agent.errors import InvalidRequest
from dlite_agent.session.messages import JSON
from dlite_agent.session.template import Reasoning, ToolStyle

_ANY_ARGUMENTS: JSON = {"type": "object", "additionalProperties": True}
_NO_ARGUMENTS: JSON = {"type": "object", "properties": {}, "additionalProperties": False}
_SEPARATORS: dict[ToolStyle, str] = {"hermes": "\n", "xml": "\n", "llama": "; "}


def tool_constraint(
    style: ToolStyle,
    tools: Sequence[JSON],
    choice: Any = "auto",
    *,
    parallel: bool = True,
    reasoning: Reasoning = "never",
) -> grammar.Constraint | None:
    """What `tool_choice` and `strict` tools ask of the response; None when nothing.

    A forced choice (required, or a named function) leaves no text around the calls, and holds arguments to the schema;
    for a tool that is not strict only if the whole schema can be enforced. Under auto, calls are held to their format
    as soon as one tool is strict, and arguments of strict tools to their schema. Llama's bare style has no marker that
    begins a call, so there auto stays free.

    Args:
        style: `ChatTemplate.tool_style`.
        tools: OpenAI-shaped tools.
        choice: the request's `tool_choice`: auto, none, required, or an object that names a function.
        parallel: more than one call is allowed.
        reasoning: `ChatTemplate.reasoning` for the request.

    Raises:
        InvalidRequest: the choice is malformed, or names a tool that is not there, or forces a call without tools; or a
        strict
            tool's schema has a keyword that cannot be enforced.
    """
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    gate: grammar.Reasoning = "open" if reasoning == "open" else "optional" if reasoning == "optional" else "none"
    if choice in (None, "auto", "none"):
        strict = any(function.get("strict") for function in functions)
        if choice == "none" or not strict or style == "llama":
            return None
        calls = [_call(style, function, held=bool(function.get("strict"))) for function in functions]
        return grammar.text_with_calls(calls, trigger="<tool_call>", several=parallel, reasoning=gate)
    if choice != "required":
        name = _named(choice)
        functions = [function for function in functions if function.get("name") == name]
        if not functions:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
        parallel = False
    calls = [_call(style, function, held=True) for function in functions]
    return grammar.calls_only(calls, separator=_SEPARATORS[style], several=parallel, reasoning=gate)


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        shape = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(f"tool_choice must be auto, none, required or {shape}.", param="tool_choice")
    return name


def _call(style: ToolStyle, function: JSON, *, held: bool) -> grammar.CallFormat:
    schema = function.get("parameters") or _NO_ARGUMENTS
    if not isinstance(schema, Mapping):
        raise InvalidRequest("A tool's parameters must be a JSON schema.", param="tools")
    if not held or (not function.get("strict") and unenforced(schema)):
        schema = _ANY_ARGUMENTS
    name = json.dumps(function.get("name"), ensure_ascii=False)
    if style == "xml":
        begin = f"<tool_call>\n<function={function.get('name')}>"
        return grammar.CallFormat(begin, schema, "</function>\n</tool_call>", xml=True)
    if style == "llama":
        return grammar.CallFormat(f'{{"name": {name}, "parameters": ', schema, "}")
    return grammar.CallFormat(f'<tool_call>\n{{"name": {name}, "arguments": ', schema, "}\n</tool_call>")
