"""JSON schemas of what no model class describes: parts of requests that are read by hand, and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from dlite_agent.config import Mode
from dlite_agent.session.messages import NOTES

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _object(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """An object that has these properties, and may have more; all are required unless `required` says which."""
    return {"type": "object", "required": list(properties if required is None else required), "properties": properties}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


# Requests.

_NOTHING = _any(_one_of(""), {"type": "null"}, {"type": "array", "maxItems": 0}, {"type": "object", "maxProperties": 0})


def _said(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Part of a conversation: beside these properties it may have notes of any kind, and more that is null or empty."""
    notes: Schema = {name: {} for name in sorted(NOTES)}
    return {**_object(properties, required), "properties": notes | properties, "additionalProperties": _NOTHING}


_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_PART = _any(
    _said({"type": _one_of("text", "input_text", "output_text"), "text": _STRING}),
    _said({"type": _one_of("refusal"), "refusal": _STRING}),
)
_CONTENT = _any(_STRING, {"type": "null"}, _list(_any(_STRING, _PART)))
_CALL = _said(
    {
        "type": _or_null(_one_of("function")),
        "function": _said({"name": {"type": "string", "minLength": 1}, "arguments": {}}, ["name"]),
    },
    ["function"],
)


def _message(roles: Sequence[str], **properties: Schema) -> Schema:
    shared = {"type": _or_null(_one_of("message")), "content": _CONTENT, "name": _or_null(_STRING)}
    return _said({"role": _one_of(*roles), **shared, **properties}, ["role"])


CHAT_MESSAGES = _list(
    _any(
        _message(("system", "developer", "user")),
        _message(("tool",), tool_call_id=_or_null(_STRING)),
        _message(
            ("assistant",),
            reasoning_content=_or_null(_STRING),
            reasoning=_or_null(_STRING),
            refusal=_or_null(_STRING),
            tool_calls=_or_null(_list(_CALL)),
        ),
    ),
    minItems=1,
)


def _function(extra: Schema | None = None) -> Schema:
    properties = {
        "name": _NAME,
        "description": _or_null(_STRING),
        "parameters": _or_null(_OBJECT),
        "strict": _or_null(_BOOLEAN),
        **(extra or {}),
    }
    return _said(properties, ["name", *(extra or {})])


def _tools(known: Schema, kind: str) -> Schema:
    """Tools of the kind that is supported, and those of any other type, which are skipped with a warning."""
    return _list(_any(known, _object({"type": {**_STRING, "not": {"enum": [kind]}}})))


_FUNCTION_TYPE = {"type": _one_of("function")}
CHAT_TOOLS = _tools(_said({**_FUNCTION_TYPE, "function": _function()}), "function")
FLAT_TOOLS = _tools(_function(_FUNCTION_TYPE), "function")
CLIENT_TOOLS = _tools(
    _said(
        {
            "type": _or_null(_one_of("custom")),
            "name": _NAME,
            "description": _or_null(_STRING),
            "input_schema": _OBJECT,
            "strict": _or_null(_BOOLEAN),
            "eager_input_streaming": {},
        },
        ["name", "input_schema"],
    ),
    "custom",
)
_WORD_CHOICE = _one_of("auto", "none", "required")
CHAT_CHOICE = _any(
    _WORD_CHOICE, {"type": "null"}, _object({"type": _one_of("function"), "function": _object({"name": _NAME})})
)
FLAT_CHOICE = _any(_WORD_CHOICE, {"type": "null"}, _object({"type": _one_of("function"), "name": _NAME}))
_ONE_CALL: Schema = {"disable_parallel_tool_use": _or_null(_BOOLEAN)}
CLIENT_CHOICE = _any(
    _object({"type": _one_of("auto", "any", "none"), "disable_parallel_tool_use": _or_null(_BOOLEAN)}, ["type"]),
    _object(
        {"type": _one_of("tool"), "name": _NAME, "disable_parallel_tool_use": _or_null(_BOOLEAN)}, ["type", "name"]
    ),
)
_ANSWER_SCHEMA = _object({"schema": _OBJECT})
_PLAIN_FORMAT = _object({"type": _one_of("text", "json_object")})
CHAT_FORMAT = _any(_PLAIN_FORMAT, _object({"type": _one_of("json_schema"), "json_schema": _ANSWER_SCHEMA}))
FLAT_FORMAT = _any(_PLAIN_FORMAT, _object({"type": _one_of("json_schema"), "schema": _OBJECT}))
CLIENT_FORMAT = _object({"format": _or_null(_object({"type": _one_of("json_schema"), "schema": _OBJECT}))}, [])
THINKING = _object({"type": _one_of("enabled", "disabled", "adaptive")})

_INPUT_ITEM = _any(
    _said(
        {"type": _or_null(_one_of("message")), "role": _one_of("user", "system", "assistant"), "content": _CONTENT},
        ["role"],
    ),
    _said({"type": _one_of("function_call"), "call_id": _STRING, "name": _NAME, "arguments": _STRING}),
    _said(
        {
            "type": _one_of("function_call_output"),
            "call_id": _STRING,
            "name": _or_null(_STRING),
            "output": _CONTENT,
        },
        ["type", "call_id", "output"],
    ),
    _said(
        {
            "type": _one_of("reasoning"),
            "content": _or_null(_list(_said({"type": _one_of("reasoning_text"), "text": _STRING}))),
        },
        ["type"],
    ),
)
INPUT = _any(_STRING, _list(_INPUT_ITEM))

_IDS = _list(_COUNT, minItems=1)
_TEXT: Schema = {"type": "string", "minLength": 1}
PROMPT = _any(_TEXT, _IDS, _list(_TEXT, minItems=1, maxItems=1), _list(_IDS, minItems=1, maxItems=1))

_TEXT_BLOCK = _said({"type": _one_of("text"), "text": _STRING})
_RESULT_BLOCK = _said(
    {
        "type": _one_of("tool_result"),
        "tool_use_id": _STRING,
        "content": _any(_STRING, {"type": "null"}, _list(_TEXT_BLOCK)),
        "is_error": _or_null(_BOOLEAN),
    },
    ["type", "tool_use_id"],
)
_USE_BLOCK = _said({"type": _one_of("tool_use"), "id": _STRING, "name": _NAME, "input": _OBJECT})
_THINKING_BLOCK = _said({"type": _one_of("thinking"), "thinking": _STRING})
SYSTEM = _any(_STRING, _list(_TEXT_BLOCK), {"type": "null"})
CLIENT_MESSAGES = _list(
    _any(
        _said({"role": _one_of("user"), "content": _any(_STRING, _list(_any(_TEXT_BLOCK, _RESULT_BLOCK)))}),
        _said(
            {
                "role": _one_of("assistant"),
                "content": _any(_STRING, _list(_any(_TEXT_BLOCK, _USE_BLOCK, _THINKING_BLOCK))),
            }
        ),
    ),
    minItems=1,
)

# Responses.

SERVER_SENT = _object({"event": _STRING, "data": _STRING}, ["data"])
"""One event of a stream."""
OPENAI_ERROR = _object(
    {
        "error": _object(
            {"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _or_null(_STRING)},
        )
    }
)
ANTHROPIC_ERROR = _object(
    {
        "type": _one_of("error"),
        "error": _object({"type": _STRING, "message": _STRING, "code": _STRING, "param": _or_null(_STRING)}),
        "request_id": _STRING,
    }
)
_DLITE = _object(
    {
        "session_id": _STRING,
        "turn": _COUNT,
        "mode": _one_of(*get_args(Mode)),
        "finish": _STRING,
        **{
            f"{phase}_seconds": _NUMBER
            for phase in ("queue", "restore", "prefill", "decode", "draft", "verify", "rest")
        },
        "rounds": _COUNT,
        "tau": _or_null(_NUMBER),
        **{f"{kind}_tokens": _COUNT for kind in ("drafted", "accepted", "restored", "prefilled")},
        "restored_from": _STRING,
        "restore_reason": _or_null(_STRING),
        "preemptions": _COUNT,
        "divergence": _or_null(_object({"reason": _STRING, "message": _COUNT, "position": _COUNT})),
    }
)
_OPENAI_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "dlite": _DLITE,
    }
)
_FINISH = _one_of("stop", "length", "tool_calls")


def _completion(kind: str, choice: Schema) -> Schema:
    choice = {"index": _COUNT, **choice, "finish_reason": _FINISH, "logprobs": _or_null(_OBJECT)}
    return _object(
        {
            "id": _STRING,
            "object": _one_of(kind),
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": _list(_object(choice), minItems=1),
            "usage": _OPENAI_USAGE,
        }
    )


_WRITTEN_CALL = _object(
    {"id": _STRING, "type": _one_of("function"), "function": _object({"name": _STRING, "arguments": _STRING})}
)
_ANSWER = _object(
    {
        "role": _one_of("assistant"),
        "content": _or_null(_STRING),
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list(_WRITTEN_CALL, minItems=1),
    },
    ["role", "content", "refusal"],
)
_RESPONSE = _object(
    {
        "id": _STRING,
        "object": _one_of("response"),
        "created_at": _COUNT,
        "status": _one_of("completed", "incomplete"),
        "error": {"type": "null"},
        "incomplete_details": _or_null(_object({"reason": _one_of("max_output_tokens")})),
        "model": _STRING,
        "output": _list(
            _object(
                {
                    "type": _one_of("message", "reasoning", "function_call"),
                    "id": _STRING,
                    "status": _one_of("completed", "incomplete"),
                }
            ),
            minItems=1,
        ),
        "tools": _list(_OBJECT),
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "input_tokens_details": _object({"cached_tokens": _COUNT}),
                "output_tokens": _COUNT,
                "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                "total_tokens": _COUNT,
                "dlite": _DLITE,
            }
        ),
    }
)
_MESSAGE = _object(
    {
        "id": _STRING,
        "type": _one_of("message"),
        "role": _one_of("assistant"),
        "model": _STRING,
        "content": _list(_object({"type": _one_of("text", "thinking", "tool_use")}), minItems=1),
        "stop_reason": _one_of("end_turn", "max_tokens", "tool_use", "stop_sequence", "model_context_window_exceeded"),
        "stop_sequence": _or_null(_STRING),
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "cache_creation_input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
                "dlite": _DLITE,
            }
        ),
    }
)
_MODEL = _object({"id": _STRING, "object": _one_of("model"), "created": _COUNT, "context_length": _COUNT})
_SESSION = _object(
    {
        "id": _STRING,
        "object": _one_of("session"),
        "name": _or_null(_STRING),
        "parent": _or_null(_STRING),
        "turns": _COUNT,
        "tokens": _COUNT,
        "in_flight": _BOOLEAN,
    }
)


def _deleted(kind: str) -> Schema:
    return _object({"id": _STRING, "object": _one_of(kind), "deleted": _BOOLEAN})


RESPONSES: dict[tuple[str, str], Schema] = {
    ("post", "/v1/chat/completions"): _completion("chat.completion", {"message": _ANSWER}),
    ("post", "/v1/completions"): _completion("text_completion", {"text": _STRING}),
    ("post", "/v1/responses"): _RESPONSE,
    ("get", "/v1/responses/{response_id}"): _RESPONSE,
    ("delete", "/v1/responses/{response_id}"): _deleted("response"),
    ("post", "/v1/messages"): _MESSAGE,
    ("post", "/v1/messages/count_tokens"): _object({"input_tokens": _COUNT}),
    ("get", "/v1/models"): _object({"object": _one_of("list"), "data": _list(_MODEL, minItems=1)}),
    ("get", "/v1/models/{model}"): _MODEL,
    ("get", "/v1/sessions"): _object({"object": _one_of("list"), "data": _list(_SESSION)}),
    ("get", "/v1/sessions/{session_id}"): _SESSION,
    ("delete", "/v1/sessions/{session_id}"): _deleted("session.deleted"),
    ("post", "/v1/sessions/{session_id}/fork"): _SESSION,
    ("post", "/tokenize"): _object({"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
    ("get", "/health"): _object({"status": _one_of("ok")}),
    ("get", "/ready"): _object({"status": _one_of("ready"), "model": _STRING}),
}
"""What a success looks like, by method and path."""
