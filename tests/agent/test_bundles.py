"""`config.yaml` is checked by file and key, rendered in a fixed order, and calls are quoted."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlite_agent.agent.bundles import BundleError, Tool, load_bundle, load_bundles
from dlite_agent.errors import InvalidRequest
from dlite_agent.paths import content_dir

NOTEBOOK = Path(__file__).parent / "bundles" / "notebook"
SHIPPED = [content_dir("tools") / name for name in ("files", "edit", "shell", "tests", "git", "submit")]


def argument(name: str = "path", **changes: Any) -> dict[str, Any]:
    return {"name": name, "type": "string", "description": "d", "required": True} | changes


def write_bundle(folder: Path, config: Any, programs: tuple[str, ...] = ("look",)) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    for program in programs:
        (folder / "bin" / program).write_text("#!/bin/sh\n")
    return folder


def one_tool(**spec: Any) -> dict[str, Any]:
    return {"tools": {"look": spec}}


@pytest.mark.parametrize(
    ("config", "key", "problem"),
    [
        ({"tolls": {}}, "tolls", "Extra inputs"),
        (one_tool(docstrings="x"), "tools.look.docstrings", "Extra inputs"),
        (one_tool(arguments=[argument(kind="x")]), "tools.look.arguments[0].kind", "Extra inputs"),
        (one_tool(arguments=[argument(type="text")]), "tools.look.arguments[0].type", "Input should be"),
        (one_tool(arguments=[{"name": "a"}]), "tools.look.arguments[0].type", "required"),
        (
            one_tool(arguments=[argument("a", required=False), argument("b")]),
            "tools.look.arguments[1].required",
            "b is required, but stands after a",
        ),
        (one_tool(arguments=[argument("a"), argument("a")]), "tools.look.arguments[1].name", "declared twice"),
        (one_tool(arguments=[argument("1a")]), "tools.look.arguments[0].name", "letters"),
        (one_tool(arguments=[argument(items={})]), "tools.look.arguments[0].items", "only an array"),
        (one_tool(arguments=[argument(type="integer", enum=["1"])]), "tools.look.arguments[0].enum", "only a string"),
        (
            one_tool(arguments=[argument(argument_format="{{value")]),
            "tools.look.arguments[0].argument_format",
            "no template",
        ),
        (one_tool(signature="look", arguments=[argument("a")]), "tools.look.signature", "does not hold the argument a"),
        (one_tool(signature="look <b>"), "tools.look.signature", "holds b, which is no argument"),
        (one_tool(signature="<a>", arguments=[argument("a")]), "tools.look.signature", "begin with the program"),
        (one_tool(signature="look", end_name="end"), "tools.look.end_name", "last line must be end"),
        (one_tool(signature="look\nit's", end_name="it's"), "tools.look.end_name", "letters"),
        ({"tools": {"lo ok": {}}}, "tools.lo ok", "letters"),
        ({"tools": {"gone": {}}}, "tools.gone", "executable bin/gone is missing"),
        ("tools:\n  look: {}\n  look: {}\n", "", "look is given twice"),
        ("tools: [", "", "cannot be read"),
    ],
)
def test_faults_are_named_by_file_and_key(tmp_path: Path, config: Any, key: str, problem: str) -> None:
    folder = write_bundle(tmp_path / "bundle", config)
    with pytest.raises(BundleError) as caught:
        load_bundle(folder)
    assert caught.value.param is not None
    file, _, named = caught.value.param.partition(": ")
    assert (file, named) == (str(folder / "config.yaml"), key)
    assert problem in caught.value.message


def test_missing_config_is_a_fault_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is missing"):
        load_bundle(tmp_path)


def test_names_are_unique_over_bundles_and_hidden_ones_must_exist(tmp_path: Path) -> None:
    first = write_bundle(tmp_path / "a" / "one", one_tool())
    second = write_bundle(tmp_path / "two", one_tool())
    with pytest.raises(BundleError) as caught:
        load_bundles([first, second])
    assert str(first / "config.yaml") in caught.value.message
    assert caught.value.param == f"{second / 'config.yaml'}: tools.look"
    again = write_bundle(tmp_path / "b" / "one", {})
    with pytest.raises(BundleError, match="same bundle name"):
        load_bundles([first, again])
    with pytest.raises(InvalidRequest, match="no-such"):
        load_bundles([first], hidden=["no-such"])
    assert load_bundles([first], hidden=["look"])[1] == {}


def test_order_of_schemas_does_not_depend_on_order_of_bundles() -> None:
    forward = [tool.schema() for tool in load_bundles(SHIPPED)[1].values()]
    backward = [tool.schema() for tool in load_bundles(reversed(SHIPPED))[1].values()]
    assert forward == backward
    names = [schema["function"]["name"] for schema in forward]
    assert names == sorted(names)


def test_schema_of_a_tool() -> None:
    tools = load_bundles([NOTEBOOK])[1]
    assert tools["tag_note"].schema() == {
        "type": "function",
        "function": {
            "name": "tag_note",
            "description": "puts tags on a note",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "which note"},
                    "mode": {"type": "string", "description": "what to do with the tags", "enum": ["add", "drop"]},
                    "tags": {"type": "array", "description": "the tags", "items": {"type": "string"}},
                },
                "required": ["name", "mode"],
                "additionalProperties": False,
            },
        },
    }


def test_bundle_without_tools_is_allowed(tmp_path: Path) -> None:
    assert load_bundle(write_bundle(tmp_path / "bundle", "tools: {}\nstate_command: 'echo'\n", ())).tools == []


NASTY = 'it\'s "$(touch pwned)" `touch pwned`; $HOME \\ | & > x\n--flag *'


def words(line: str) -> list[str]:
    """What the shell makes of the arguments of `line`."""
    script = f'{line.split(" ", 1)[0]}() {{ printf "%s\\0" "$@"; }}; {line}'
    printed = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    return printed.decode().split("\0")[:-1]


def test_values_reach_the_program_untouched() -> None:
    tools = load_bundles([NOTEBOOK])[1]
    assert words(tools["open_note"].shell_line({"name": NASTY, "line": 3})) == [NASTY, "3"]
    assert words(tools["open_note"].shell_line({"name": NASTY})) == [NASTY]
    assert words(tools["open_note"].shell_line({"name": "", "line": None})) == [""]
    tagged = tools["tag_note"].shell_line({"name": "n", "mode": "add", "tags": [NASTY, "b c"]})
    assert words(tagged) == ["n", "--mode", "add", "--tags", NASTY, "b c"]


def test_text_up_to_an_end_word_is_not_interpreted() -> None:
    tool = load_bundles([NOTEBOOK])[1]["write_note"]
    line = tool.shell_line({"name": "n", "body": NASTY})
    script = f"write_note() {{ cat; }}; {line}"
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout == NASTY + "\n"
    with pytest.raises(InvalidRequest, match="which ends the call"):
        tool.shell_line({"name": "n", "body": "a\nend_of_note\ntouch pwned"})


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "name"),
        ({"name": "n", "mode": "add", "color": "red"}, "color"),
        ({"name": 3, "mode": "add"}, "name"),
        ({"name": "n", "mode": "keep"}, "mode"),
        ({"name": "n", "mode": "add", "tags": "a"}, "tags"),
        ({"name": "n\0", "mode": "add"}, "name"),
        ({"name": "n" * 200_000, "mode": "add"}, "name"),
        ({"name": None, "mode": "add"}, "name"),
    ],
)
def test_arguments_that_do_not_fit_are_named(values: dict[str, Any], param: str) -> None:
    tool: Tool = load_bundles([NOTEBOOK])[1]["tag_note"]
    with pytest.raises(InvalidRequest) as caught:
        tool.shell_line(values)
    assert caught.value.param == param


def test_true_is_no_integer() -> None:
    tool = load_bundles([NOTEBOOK])[1]["open_note"]
    with pytest.raises(InvalidRequest, match="integer"):
        tool.shell_line({"name": "n", "line": True})
