"""Chat templates of real tokenizers, and small ones written here for what those do not do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from dlite_agent.errors import InvalidRequest, ModelError
from dlite_agent.session.messages import JSON, normalise
from dlite_agent.session.template import ChatTemplate
from tests.session.talk import WEATHER, Talk, assistant, system, tool, user
from tests.tokenizers import load

NAMES = ("smollm2", "qwen3", "llama3_1")
CALL = ("weather", '{"city": "Paris", "days": 2}')

# Refuses a system message anywhere but at the start, and writes calls as Qwen-coder does.
STRICT_XML = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('A late system message.') }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if loop.first and tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""

# Writes one bare JSON object for a call, as Llama 3.1 does.
BARE_JSON = """
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) }}
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(load(name))


def with_template(name: str, text: str | None) -> ChatTemplate:
    tokenizer = copy.deepcopy(load(name))
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def full(
    t: ChatTemplate, messages: Sequence[JSON], tools: Sequence[JSON] | None = None, thinking: bool | None = None
) -> list[int]:
    return t.encode(t.render(normalise(messages), tools, thinking=thinking))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_tokenizers_own(name: str) -> None:
    t = template(name)
    text = t.render(normalise([user("Größe 漢字 \n\n  x = {'a': 1}\t"), assistant("ok"), user("go")]))
    assert t.encode(text) == load(name).encode(text, add_special_tokens=False)


def test_what_is_found_out_about_each_template() -> None:
    smol, qwen, llama = (template(name) for name in NAMES)
    assert [t.native_tools for t in (smol, qwen, llama)] == [False, True, False]
    assert [t.tool_style for t in (smol, qwen, llama)] == ["hermes"] * 3
    assert [t.switches_thinking for t in (smol, qwen, llama)] == [False, True, False]
    assert qwen.reasoning() == qwen.reasoning(thinking=True) == "optional"
    assert qwen.reasoning(thinking=False) == "closed"
    assert smol.reasoning() == llama.reasoning() == "never"
    assert load("qwen3").convert_ids_to_tokens(qwen.turn_end) == "<|im_end|>"
    assert load("llama3_1").convert_ids_to_tokens(llama.turn_end) == "<|eot_id|>"


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_tails_add_up_to_the_full_render(name: str, tools: list[JSON] | None) -> None:
    talk = Talk(template(name), tools)
    said: list[JSON] = [system("Be brief."), user("Hello!")]
    for text, more in [
        ("Hi there.", [user("Two\nlines\n")]),
        ("Fine", [user("a"), system("New rules."), user("b")]),
        ("x = 1\n\n\ty", [user(" spaces ")]),
        ("Bye.", [user("Wait")]),
    ]:
        prompt = talk.ask(said)
        assert prompt.ids == full(talk.template, said, tools)
        assert prompt.keep == len(talk.ids)
        talk.answer(prompt, assistant(text), text)
        said += [assistant(text), *more]
    assert talk.ask(said).ids == full(talk.template, said, tools)


@pytest.mark.parametrize("name", ["smollm2", "llama3_1"])
def test_nothing_new_still_closes_the_answer(name: str) -> None:
    talk = Talk(template(name))
    talk.answer(talk.ask([user("Hi")]), assistant("Yo"), "Yo", stop=None)
    said = [user("Hi"), assistant("Yo")]
    assert talk.ask(said).ids == full(talk.template, said)


def call_text(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


@pytest.mark.parametrize("name", NAMES)
def test_tool_turns_add_up_to_the_full_render(name: str) -> None:
    talk = Talk(template(name), [WEATHER])
    said: list[JSON] = [user("Weather?")]
    both = (CALL, ("weather", '{"city": "Rome", "days": 1}'))
    for answer, text, more in [
        (assistant("Let me see.", CALL), "Let me see.\n" + call_text(CALL), [tool("sunny")]),
        (assistant(None, *both), call_text(*both), [tool("rain"), tool("wind", "call_1")]),
        (assistant("Sun, rain, wind."), "Sun, rain, wind.", [user("Thanks.")]),
    ]:
        prompt = talk.ask(said)
        assert prompt.ids == full(talk.template, said, [WEATHER])
        talk.answer(prompt, answer, text)
        said += [answer, *more]
    assert talk.ask(said).ids == full(talk.template, said, [WEATHER])


def test_reasoning_of_a_tool_loop_adds_up_to_the_full_render() -> None:
    talk = Talk(template("qwen3"), [WEATHER], thinking=True)
    first = assistant(None, CALL, reasoning="A tool knows.")
    second = assistant(None, CALL, reasoning="Once more.")
    said: list[JSON] = [user("Weather?")]
    for answer, thought in [(first, "A tool knows."), (second, "Once more.")]:
        prompt = talk.ask(said)
        assert prompt.ids == full(talk.template, said, [WEATHER], thinking=True)
        talk.answer(prompt, answer, f"<think>\n{thought}\n</think>\n\n{call_text(CALL)}")
        said += [answer, tool("sunny")]
    assert talk.ask(said).ids == full(talk.template, said, [WEATHER], thinking=True)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_where_the_template_drops_reasoning_the_stored_ids_stand(thinking: bool | None) -> None:
    talk = Talk(template("qwen3"), thinking=thinking)
    prompt = talk.ask([user("Hi")])
    thought = "" if thinking is False else "<think>\nhm\n</think>\n\n"
    talk.answer(prompt, assistant("Hello", reasoning="hm"), thought + "Hello")
    said = [user("Hi"), assistant("Hello"), user("More")]
    after = talk.ask(said)
    tail = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    assert after.ids == talk.ids + talk.template.encode(tail) + talk.template.prompt(thinking=thinking)[3:]
    assert after.ids != full(talk.template, said, thinking=thinking)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_without_its_end_gets_one(name: str) -> None:
    talk = Talk(template(name))
    talk.answer(talk.ask([user("Count")]), assistant("1 2 3"), "1 2 3", stop=None)
    said = [user("Count"), assistant("1 2 3"), user("Go on")]
    assert talk.ask(said).ids == full(talk.template, said)
    assert talk.ask(said).keep == len(talk.ids)


def test_another_stop_token_gives_way_to_the_templates_own() -> None:
    end_of_text = load("qwen3").convert_tokens_to_ids("<|endoftext|>")
    talk = Talk(ChatTemplate(load("qwen3"), stop_ids=[end_of_text]))
    talk.answer(talk.ask([user("Hi")]), assistant("Yo"), "Yo", stop=end_of_text)
    said = [user("Hi"), assistant("Yo"), user("Go on")]
    prompt = talk.ask(said)
    assert prompt.ids == full(talk.template, said)
    assert prompt.keep == prompt.shared == len(talk.ids) - 1


@pytest.mark.parametrize("name", NAMES)
def test_generated_ids_are_kept_however_they_were_split(name: str) -> None:
    talk = Talk(template(name))
    odd = [i for char in "Hello there" for i in talk.template.encode(char)]
    assert odd != talk.template.encode("Hello there")
    talk.answer(talk.ask([user("Hi")]), assistant("Hello there"), odd)
    prompt = talk.ask([user("Hi"), assistant("Hello there"), user("x")])
    assert prompt.ids[: len(talk.ids)] == talk.ids


@pytest.mark.parametrize("name", NAMES)
def test_missing_null_empty_and_split_content_render_alike(name: str) -> None:
    t = template(name)
    forms: list[Any] = [None, "", [], [{"type": "text", "text": ""}]]
    answers: list[dict[str, Any]] = [assistant(None, CALL) | {"content": form} for form in forms]
    answers.append({k: v for k, v in assistant(None, CALL).items() if k != "content"})
    renders = {t.render(normalise([user("q"), a, tool("r")]), [WEATHER]) for a in answers}
    assert len(renders) == 1
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert t.render(normalise([{"role": "user", "content": parts}])) == t.render(normalise([user("a\nb")]))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_may_be_text_or_an_object(name: str) -> None:
    t = template(name)
    as_object = assistant(None, CALL)
    as_object["tool_calls"][0]["function"]["arguments"] = {"city": "Paris", "days": 2}
    assert t.render(normalise([user("q"), as_object])) == t.render(normalise([user("q"), assistant(None, CALL)]))


@pytest.mark.parametrize("name", NAMES)
def test_invalid_arguments_in_history_are_passed_through(name: str) -> None:
    text = template(name).render(normalise([user("q"), assistant(None, ("weather", '{"city": "Pa')), tool("no")]))
    assert '{"city": "Pa' in text


def test_leading_system_messages_become_one() -> None:
    t = template("qwen3")
    text = t.render(normalise([system("One."), {"role": "developer", "content": "Two."}, user("q")]))
    assert text.startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n<|im_start|>user\nq")


def test_a_template_that_refuses_late_system_messages_gets_them_as_user_messages() -> None:
    t = with_template("smollm2", STRICT_XML)
    talk = Talk(t)
    talk.answer(talk.ask([system("S"), user("q")]), assistant("a"), "a")
    said = [system("S"), user("q"), assistant("a"), system("Now in French."), user("r")]
    new = talk.ask(said).ids[len(talk.ids) :]
    assert new == full(t, said)[-len(new) :]
    expected = "\n<|im_start|>user\n<system>\nNow in French.\n</system><|im_end|>\n<|im_start|>user\nr<|im_end|>\n"
    assert load("smollm2").decode(new) == expected + "<|im_start|>assistant\n<think>\n"


def test_xml_and_bare_styles_are_recognised_and_add_up() -> None:
    xml, bare = with_template("smollm2", STRICT_XML), with_template("llama3_1", BARE_JSON)
    assert (xml.tool_style, xml.native_tools, xml.reasoning()) == ("xml", True, "open")
    assert (bare.tool_style, bare.native_tools, bare.reasoning()) == ("llama", True, "never")
    parameters = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    written = {
        xml: f"<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>",
        bare: '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
    }
    for t, text in written.items():
        said = [system("S"), user("q"), assistant(None, CALL), tool("sunny")]
        assert text in t.render(normalise(said), [WEATHER])
        answer = t.encode(text)
        after = t.after_answer(answer[-1], normalise(said[3:]), [WEATHER])
        start = t.encode(t.render(normalise(said), [WEATHER]).partition(text)[0])
        assert start + answer + after.ids + after.prompt == full(t, said, [WEATHER])


def test_invalid_arguments_are_wrapped_where_the_template_needs_an_object() -> None:
    text = with_template("smollm2", STRICT_XML).render(normalise([user("q"), assistant(None, ("f", "[1")), tool("x")]))
    assert "<parameter=raw>\n[1\n</parameter>" in text


def test_tools_without_a_template_for_them_stand_in_the_system_message() -> None:
    text = template("smollm2").render(normalise([system("S"), user("q")]), [WEATHER])
    head, _, rest = text.partition("<|im_end|>")
    assert head.startswith("<|im_start|>system\nS\n\n")
    assert '{"type": "function", "function": {"name": "weather"' in head
    assert rest == "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_the_clock_does_not_change_a_prompt() -> None:
    t = with_template("smollm2", "{{ date_string }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert t.render(normalise([user("q")])).startswith("26 Jul 2024")


def test_unusable_templates_are_refused() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        with_template("smollm2", None)
    with pytest.raises(ModelError, match="does not end"):
        with_template("smollm2", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    odd = "{% if add_generation_prompt %}X{% endif %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ModelError, match="rewrites the messages"):
        with_template("smollm2", odd).opening(normalise([user("q")]))


def test_refusals_name_the_messages() -> None:
    picky = "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('No.') }}{% endif %}"
    t = with_template("smollm2", picky + "{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(InvalidRequest, match=r"refuses this conversation: No\.") as caught:
        t.opening(normalise([user("no")]))
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        t.opening(normalise([user("a\ud800b")]))
