"""Chat templates: messages to ids, whole or only the new tail.

A session never renders what it already holds as ids. `after_answer` renders what follows an assistant's generated
tokens: the new messages are put behind a stand-in answer in a small synthetic conversation, and the text behind that
answer is the tail. Special tokens cut the text into pieces that are tokenised on their own, so stored ids + tail equal
a render of the whole conversation wherever the template leaves the past alone. Where it rewrites the past (Qwen3 drops
old reasoning) the stored ids stand.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from dlite_agent.errors import InvalidRequest, ModelError
from dlite_agent.session.messages import JSON, Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolStyle = Literal["hermes", "llama", "xml"]
Reasoning = Literal["never", "closed", "optional", "open"]

# Llama 3.1's own default. Later templates read the clock, which would change a prompt's first tokens every day.
_DATE = "26 Jul 2024"
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, AttributeError, KeyError)
_PROBE_TOOL: JSON = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Render:
    """Ids of messages, and the ids that then ask for an answer.

    Attributes:
        trim: ids to drop from the end of the stored ones first: 1 when the stored answer ended with a stop token that
            is not the one the template writes, else 0.
        ids: the messages, closed.
        prompt: the generation prompt.
    """

    trim: int
    ids: list[int]
    prompt: list[int]


class ChatTemplate:
    """A tokenizer's chat template, with what had to be found out about it.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        stop_ids: every id that ends a generation; the tokenizer's `eos_token_id` is added.

    Attributes:
        native_tools: the template renders tools itself; otherwise definitions go into the system message, calls and
            results into `<tool_call>` and `<tool_response>` blocks of JSON, the convention of Hermes models.
        tool_style: how a call is written: "hermes" and "xml" (Qwen-coder) inside `<tool_call>`, "llama" as a bare JSON
            object.
        switches_thinking: `thinking=False` changes the generation prompt.
        turn_end: the id that closes an assistant's message.

    Raises:
        ModelError: no chat template, a slow tokenizer, or a template whose assistant messages do not end with a token
        of their own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("The tokenizer has no chat template; use a chat or instruct model.", param="chat_template")
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError("The tokenizer is not a fast one (tokenizer.json is missing).", param="tokenizer")
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.stop_ids = frozenset(stop_ids) | ({tokenizer.eos_token_id} - {None})
        self._mark = f"a{uuid.uuid4().hex}z"
        self.native_tools, self.tool_style = self._probe_tools()
        self._string_arguments = self.native_tools and self._takes_string_arguments()
        self._mid_system = self._takes_mid_system()
        self.switches_thinking = self._prompt_text(True) != self._prompt_text(False)
        closing = self.encode(self._after_mark([Message("user", ".")], None, None)[0])
        if not closing or closing[0] not in self._backend.get_added_tokens_decoder():
            raise ModelError(
                "The chat template does not end an assistant's message with a token.", param="chat_template"
            )
        self.turn_end: int = closing[0]

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, special tokens recognised and none added.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which is no character.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("The text holds a lone surrogate (\\ud800-\\udfff).", param="messages") from error
        return ids

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JSON] | None = None,
        *,
        thinking: bool | None = None,
        prompt: bool = True,
    ) -> str:
        """The whole conversation as the template writes it; equal messages and options give equal text.

        Args:
            thinking: True or False sets the template's `enable_thinking`; None leaves its default.
            prompt: end with the generation prompt.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        prepared, passed = self._prepare(messages, tools)
        return self._apply(prepared, passed, thinking, prompt)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[JSON] | None = None, *, thinking: bool | None = None
    ) -> Render:
        """Ids of a conversation from its start."""
        prepared, passed = self._prepare(messages, tools)
        body = self._apply(prepared, passed, thinking, False)
        return Render(0, self.encode(body), self._rest(body, self._apply(prepared, passed, thinking, True)))

    def after_answer(
        self,
        last_id: int,
        messages: Sequence[Message],
        tools: Sequence[JSON] | None = None,
        *,
        thinking: bool | None = None,
    ) -> Render:
        """Ids that follow an assistant's generated tokens, the last of which is `last_id`.

        The end-of-turn token is added when generation did not write it (a length limit, a stop string). Messages may
        hold assistant messages that were not generated here; they are rendered as text.
        """
        body, whole = self._after_mark(messages, tools, thinking)
        ids = self.encode(body)
        prompt = self._rest(body, whole)
        if last_id == self.turn_end:
            return Render(0, ids[1:], prompt)
        return Render(int(last_id in self.stop_ids), ids, prompt)

    def prompt(self, *, thinking: bool | None = None) -> list[int]:
        """The generation prompt alone."""
        return self.encode(self._prompt_text(thinking))

    def reasoning(self, *, thinking: bool | None = None) -> Reasoning:
        """Where a generation starts: inside a `<think>` block ("open"), behind one, maybe before one, or without."""
        text = self._prompt_text(thinking).rstrip()
        if text.endswith("<think>"):
            return "open"
        if text.endswith("</think>"):
            return "closed"
        return "optional" if self._backend.token_to_id("<think>") is not None else "never"

    def _rest(self, body: str, whole: str) -> list[int]:
        if not whole.startswith(body):
            raise ModelError("The chat template's generation prompt rewrites the messages.", param="chat_template")
        return self.encode(whole[len(body) :])

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[JSON] | None, thinking: bool | None, prompt: bool
    ) -> str:
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                date_string=_DATE,
                **options,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        return text

    def _after_mark(
        self, messages: Sequence[Message], tools: Sequence[JSON] | None, thinking: bool | None
    ) -> tuple[str, str]:
        """What follows the stand-in answer, from its end-of-turn token on: without and with the generation prompt."""
        context = [Message("user", "."), Message("assistant", self._mark)]
        prepared, passed = self._prepare([*context, *messages], tools if self.native_tools else None)
        body = self._apply(prepared, passed, thinking, False)
        whole = self._apply(prepared, passed, thinking, True)
        return body.partition(self._mark)[2], whole.partition(self._mark)[2]

    def _prompt_text(self, thinking: bool | None) -> str:
        messages = [{"role": "user", "content": "."}]
        body = self._apply(messages, None, thinking, False)
        return self._apply(messages, None, thinking, True).removeprefix(body)

    def _prepare(
        self, messages: Sequence[Message], tools: Sequence[JSON] | None
    ) -> tuple[list[dict[str, Any]], Sequence[JSON] | None]:
        """Messages as the template takes them. The system messages at the start become one."""
        first = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        systems = [m.content for m in messages[:first]]
        if tools and not self.native_tools:
            systems.append(_describe_tools(tools))
            tools = None
        out: list[dict[str, Any]] = []
        if systems:
            out.append({"role": "system", "content": "\n\n".join(systems)})
        for message in messages[first:]:
            if message.role == "system" and not self._mid_system:
                out.append({"role": "user", "content": f"<system>\n{message.content}\n</system>"})
            elif message.role == "tool" and not self.native_tools:
                _append_response(out, message.content)
            else:
                out.append(self._as_dict(message))
        return out, tools

    def _as_dict(self, message: Message) -> dict[str, Any]:
        out: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            out["reasoning_content"] = message.reasoning
        if message.role == "tool":
            out |= {"tool_call_id": message.tool_call_id, "name": message.name}
        if message.tool_calls and not self.native_tools:
            blocks = [_tool_call_block(call) for call in message.tool_calls]
            out["content"] = "\n".join(([message.content] if message.content else []) + blocks)
        elif message.tool_calls:
            out["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": self._arguments(call)}}
                for call in message.tool_calls
            ]
        return out

    def _arguments(self, call: ToolCall) -> Any:
        """Verbatim text where the template writes a string as it is, else the value; invalid JSON is wrapped."""
        if self._string_arguments:
            return call.arguments
        try:
            value = json.loads(call.arguments, strict=False)
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"raw": call.arguments}

    def _probe_tools(self) -> tuple[bool, ToolStyle]:
        call = {"id": "call00000", "type": "function", "function": {"name": "probe_tool", "arguments": {"probe": "x"}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", "content": "."},
        ]
        try:
            listed = "probe_tool" in self._apply(messages[:1], [_PROBE_TOOL], None, True)
            written = self._apply(messages, None, None, False)
        except InvalidRequest:
            return False, "hermes"
        if listed and "<function=probe_tool>" in written:
            return True, "xml"
        if listed and "<tool_call>" in written:
            return True, "hermes"
        if listed and '"parameters"' in written:
            return True, "llama"
        return False, "hermes"

    def _takes_string_arguments(self) -> bool:
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "probe_tool", "arguments": '{"probe":  "x"}'},
        }
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "."}, answer]
        try:
            return '{"probe":  "x"}' in self._apply(messages, None, None, False)
        except InvalidRequest:
            return False

    def _takes_mid_system(self) -> bool:
        roles = ("system", "user", "assistant", "system", "user")
        messages: list[dict[str, Any]] = [{"role": role, "content": f"probe{i}"} for i, role in enumerate(roles)]
        try:
            return "probe3" in self._apply(messages, None, None, True)
        except InvalidRequest:
            return False


def _describe_tools(tools: Sequence[JSON]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. Their definitions, one JSON object a line:\n<tools>\n{lines}\n</tools>\n\n"
        "To call one, write its name and arguments as one JSON object between these tags, and wait for the result:\n"
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"an argument": "its value"}}\n</tool_call>'
    )


def _tool_call_block(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _append_response(out: list[dict[str, Any]], content: str) -> None:
    """A tool's result as part of a user message; results that follow one another share it."""
    block = f"<tool_response>\n{content}\n</tool_response>"
    if out and out[-1].get("responses"):
        out[-1]["content"] += "\n" + block
    else:
        out.append({"role": "user", "content": block, "responses": True})
