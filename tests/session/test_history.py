"""Which part of a re-sent conversation is the stored one, why not all of it, and what the next prompt is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dlite_agent.session.history import Divergence, History, compare
from dlite_agent.session.messages import JSON, normalise
from tests.session.talk import WEATHER, Talk, assistant, system, tool, user
from tests.session.test_template import full, template
from tests.tokenizers import load

S, U1, U2 = system("S"), user("one"), user("two")
CALL = assistant(None, ("weather", '{"city": "Rome", "days": 1}'))
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
R, A1, A2 = tool("sun"), assistant("It is sunny."), assistant("Done.")
STORED: list[JSON] = [S, U1, CALL, R, A1, U2, A2]


def stored(tools: Sequence[JSON] | None = (WEATHER,), name: str = "smollm2") -> Talk:
    """Three turns: S U1 | CALL, R | A1, U2 | A2."""
    talk = Talk(template(name), tools)
    said: list[JSON] = []
    for new, answer, text in [([S, U1], CALL, CALL_TEXT), ([R], A1, "It is sunny."), ([U2], A2, "Done.")]:
        said += new
        prompt = talk.ask(said)
        talk.answer(prompt, answer, text)
        said.append(answer)
    return talk


@pytest.mark.parametrize(
    ("messages", "reason", "equal", "turns"),
    [
        (STORED, None, 7, 3),
        ([*STORED, user("three")], None, 7, 3),
        (STORED[:6], Divergence.RETRY, 6, 2),
        (STORED[:4], Divergence.TRUNCATED, 4, 1),
        (STORED[:5], Divergence.TRUNCATED, 5, 2),
        (STORED[:1], Divergence.TRUNCATED, 1, 0),
        ([system("T"), *STORED[1:]], Divergence.SYSTEM_CHANGED, 0, 0),
        (STORED[1:], Divergence.SYSTEM_CHANGED, 0, 0),
        ([S, system("more"), *STORED[1:]], Divergence.SYSTEM_CHANGED, 1, 0),
        ([*STORED[:5], user("2")], Divergence.EDITED, 5, 2),
        ([*STORED[:3], tool("rain"), *STORED[4:]], Divergence.EDITED, 3, 1),
        ([*STORED[:6], assistant("Done!"), user("x")], Divergence.EDITED, 6, 2),
        ([*STORED[:2], A1, *STORED[5:], user("x")], Divergence.COMPACTED, 2, 0),
        ([S, user("Summary: sunny.")], Divergence.COMPACTED, 1, 0),
        ([S, user("Summary."), A2, user("x")], Divergence.COMPACTED, 1, 0),
    ],
)
def test_the_first_difference_and_its_reason(
    messages: list[JSON], reason: Divergence | None, equal: int, turns: int
) -> None:
    talk = stored()
    match = compare(talk.history, normalise(messages), [WEATHER])
    assert (match.divergence, match.equal, match.turns) == (reason, equal, turns)
    assert match.keep == (talk.history.turns[turns].prompt_end if match.at_prompt else [0, *ends(talk)][turns])
    prompt = talk.ask(messages)
    assert prompt.at == (None if reason is None else equal)
    assert prompt.ids == full(talk.template, messages, [WEATHER])
    assert prompt.ids[: prompt.keep] == talk.ids[: match.keep]


def ends(talk: Talk) -> list[int]:
    return [turn.end for turn in talk.history.turns]


def test_an_edited_user_message_late_in_a_conversation_is_an_edit_even_if_all_behind_it_is_gone() -> None:
    talk = stored()
    prompt = talk.ask([*STORED, user("three")])
    talk.answer(prompt, A1, "It is sunny.")
    match = compare(talk.history, normalise([*STORED[:5], user("again")]), [WEATHER])
    assert match.divergence is Divergence.EDITED


def test_changed_tools_keep_nothing_but_the_generated_ids() -> None:
    talk = stored()
    other: JSON = {"type": "function", "function": {"name": "other"}}
    match = compare(talk.history, normalise(STORED), [WEATHER, other])
    assert (match.divergence, match.equal, match.keep) == (Divergence.TOOLS_CHANGED, 0, 0)
    talk.tools = [WEATHER, other]
    prompt = talk.ask([*STORED, user("x")])
    assert prompt.at == 0
    assert prompt.keep == 0
    assert prompt.ids == full(talk.template, [*STORED, user("x")], talk.tools)


def test_a_retry_renders_nothing_but_the_generation_prompt() -> None:
    talk = stored()
    prompt = talk.ask(STORED[:6])
    assert prompt.match.at_prompt
    last = talk.history.turns[-1]
    assert prompt.keep == last.prompt_end == prompt.prompt_end
    assert prompt.shared == len(prompt.ids) == last.end - len(talk.answers[-1])


def test_ids_are_shared_beyond_the_boundary_when_rendering_gives_the_same() -> None:
    talk = stored()
    prompt = talk.ask([*STORED[:5], user("two and a half")])
    head = talk.template.encode("\n<|im_start|>user\ntwo")
    assert prompt.shared == prompt.keep + len(head)
    changed = talk.ask([system("S and more"), *STORED[1:]])
    assert changed.keep == 0
    assert changed.shared == len(talk.template.encode("<|im_start|>system\nS"))


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [system("New rules."), *said[1:]],
        lambda said: [S, user("Summary"), *said[4:]],
        lambda said: [*said[:3], tool("other"), *said[4:]],
    ],
    ids=["system", "compacted", "edited"],
)
def test_answers_behind_a_difference_keep_their_ids(change: Callable[[list[JSON]], list[JSON]]) -> None:
    talk = Talk(template("smollm2"))
    odd = [[i for char in text for i in talk.template.encode(char)] for text in ("First one.", "Second one.")]
    talk.answer(talk.ask([S, U1]), assistant("First one."), odd[0])
    said: list[JSON] = [S, U1, assistant("First one."), U2]
    talk.answer(talk.ask(said), assistant("Second one."), odd[1])
    said = change([*said, assistant("Second one."), user("three")])
    prompt = talk.ask(said)
    after = talk.template.encode("<|im_start|>assistant\n") + talk.answers[1]
    assert contains(prompt.ids, after)
    expected = talk.template.render(normalise(said))
    assert talk.template.encode(expected) != prompt.ids
    assert decode(prompt.ids) == expected
    talk.answer(prompt, assistant("Third."), "Third.")
    again = talk.ask([*said, assistant("Third."), user("four")])
    assert (again.match.divergence, again.keep) == (None, len(talk.ids))


def test_one_stored_answer_is_used_once() -> None:
    talk = Talk(template("smollm2"))
    talk.answer(talk.ask([U1]), assistant("ok"), [*talk.template.encode("o"), *talk.template.encode("k")])
    talk.answer(talk.ask([U1, assistant("ok"), U2]), assistant("ok"), "ok")
    prompt = talk.ask([S, U1, assistant("ok"), U2, assistant("ok"), user("x"), assistant("ok"), user("y")])
    expected = [*talk.answers, [*talk.template.encode("ok"), talk.template.turn_end]]
    found = [part for part in split(prompt.ids, talk.template.encode("<|im_start|>assistant\n"))][1:4]
    assert [part[: len(e)] for part, e in zip(found, expected, strict=True)] == expected


def test_a_history_survives_json_and_digests_tolerate_the_client() -> None:
    talk = stored()
    talk.history = History.from_json(json.loads(json.dumps(talk.history.to_json())))
    sloppy: list[dict[str, Any]] = [dict(m) for m in STORED]
    sloppy[2] = assistant("", ("weather", '{"days":1,"city":"Rome"}'))
    sloppy[4] = assistant(" It is sunny.", reasoning="lost and found")
    sloppy[6] = {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}
    prompt = talk.ask([*sloppy, user("x")])
    assert (prompt.match.divergence, prompt.keep) == (None, len(talk.ids))


def test_an_empty_history_takes_everything_new() -> None:
    prompt = Talk(template("smollm2")).ask([S, U1, A1, U2])
    assert (prompt.keep, prompt.shared, prompt.at, prompt.match.divergence) == (0, 0, None, None)
    assert prompt.ids == full(template("smollm2"), [S, U1, A1, U2])


def test_reasoning_that_the_client_dropped_stays_in_the_ids() -> None:
    talk = Talk(template("qwen3"))
    talk.answer(talk.ask([U1]), assistant("Yes.", reasoning="hm"), "<think>\nhm\n</think>\n\nYes.")
    prompt = talk.ask([U1, assistant("Yes."), U2])
    assert prompt.match.divergence is None
    assert prompt.ids[: len(talk.ids)] == talk.ids


def decode(ids: Sequence[int]) -> str:
    text: str = load("smollm2").decode(ids)
    return text


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[i : i + len(part)]) == list(part) for i in range(len(ids)))


def split(ids: list[int], at: list[int]) -> list[list[int]]:
    out: list[list[int]] = [[]]
    i = 0
    while i < len(ids):
        if ids[i : i + len(at)] == at:
            out.append([])
            i += len(at)
        else:
            out[-1].append(ids[i])
            i += 1
    return out
