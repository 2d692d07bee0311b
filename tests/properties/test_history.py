"""Prompts made of stored ids are the ones the template would write, for any conversation and any change to it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.session.history import History
from dlite_agent.session.messages import JSON, normalise
from tests.session.talk import WEATHER, Talk, assistant, system, tool, user
from tests.session.test_template import full, template
from tests.tokenizers import load

NAMES = st.sampled_from(["smollm2", "llama3_1"])
# What a template leaves as it is: text that starts and ends with something to see.
WORDS = st.lists(st.sampled_from(["a", "Bob's", "x = 1", "\n\n", "漢字", "  ", "é", "{", "1234", "."]), max_size=6)
SAID = WORDS.map(lambda words: "s" + "".join(words) + "e")
Rounds = list[tuple[list[dict[str, Any]], dict[str, Any]]]
CALLS = st.lists(st.integers(0, 99), max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> Rounds:
    """What each request adds, and its answer; calls are followed by their results."""
    out: Rounds = []
    waiting = 0
    for i in range(draw(st.integers(1, 4))):
        new = [tool(draw(SAID), f"call_{j}") for j in range(waiting)]
        if not new or draw(st.booleans()):
            new.append(user(draw(SAID)))
        if i == 0 and draw(st.booleans()):
            new.insert(0, system(draw(SAID)))
        calls = [("weather", json.dumps({"city": f"c{n}", "days": n})) for n in draw(CALLS)]
        silent = bool(calls) and draw(st.booleans())
        text = None if silent else draw(SAID)
        waiting = len(calls)
        out.append((new, assistant(text, *calls)))
    return out


def generated(talk: Talk, said: list[dict[str, Any]], answer: dict[str, Any], odd: bool) -> list[int]:
    """The answer's ids as the template writes it, or the same text in other pieces."""
    head = talk.template.render(normalise(said), talk.tools)
    text = talk.template.render(normalise([*said, answer]), talk.tools, prompt=False).removeprefix(head)
    text = text[: text.rindex(load("llama3_1" if "eot" in text else "smollm2").eos_token)]
    return [i for char in text for i in talk.template.encode(char)] if odd else talk.template.encode(text)


def play(talk: Talk, rounds: Rounds, odd: bool = False) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for new, answer in rounds:
        said += new
        prompt = talk.ask(said)
        assert prompt.keep == len(talk.ids) == prompt.shared
        if not odd:
            assert prompt.ids == full(talk.template, said, talk.tools)
        talk.answer(prompt, answer, generated(talk, said, answer, odd))
        said.append(answer)
    return said


@given(NAMES, turns(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_conversation_grows_by_tails_alone(name: str, rounds: Rounds, tools: bool) -> None:
    talk = Talk(template(name), [WEATHER] if tools else None)
    said = [*play(talk, rounds), user("end")]
    assert talk.ask(said).ids == full(talk.template, said, talk.tools)


@given(NAMES, turns(), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_after_any_change_the_prompt_is_the_template_s_and_the_past_is_the_stored_one(
    name: str, rounds: Rounds, odd: bool, data: st.DataObject
) -> None:
    talk = Talk(template(name), [WEATHER])
    said = play(talk, rounds, odd)
    changed = change(said, data)
    prompt = talk.ask(changed)
    assert prompt.ids[: prompt.shared] == talk.ids[: prompt.shared]
    assert prompt.keep <= prompt.shared
    assert prompt.match.keep - 1 <= prompt.keep <= prompt.match.keep
    expected = talk.template.render(normalise(changed), talk.tools)
    assert load(name).decode(prompt.ids, clean_up_tokenization_spaces=False) == expected
    if not odd:
        assert prompt.ids == talk.template.encode(expected)
    talk.answer(prompt, assistant("sNext"), "sNext")
    talk.history = History.from_json(json.loads(json.dumps(talk.history.to_json())))
    again = talk.ask([*changed, assistant("sNext"), user("more")])
    assert again.match.divergence is None
    assert again.keep == len(talk.ids)


def change(said: list[dict[str, Any]], data: st.DataObject) -> list[JSON]:
    """The conversation as a client might send it back: edited, cut, compacted, under another system prompt, longer."""
    out: list[JSON] = list(said)
    at = data.draw(st.integers(0, len(out) - 1))
    match data.draw(st.sampled_from(["append", "edit", "cut", "compact", "system", "drop"])):
        case "edit":
            out[at] = {**out[at], "content": "sEdited"}
        case "cut":
            out = out[: at + 1]
        case "compact":
            out = [user("sSummary"), *out[at:]]
        case "system":
            out = [system("sOther"), *[m for m in out if m["role"] != "system"]]
        case "drop":
            del out[at]
    if not out or out[-1]["role"] == "assistant" or data.draw(st.booleans()):
        out.append(user("sMore"))
    return out
