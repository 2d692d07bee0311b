"""Tool bundles: the folder layout and `config.yaml` of SWE-agent, checked, and rendered to function schemas.

A bundle is a folder with `config.yaml`, `bin/` (on the PATH of every call), optionally `lib/` and `install.sh`. A tool
call becomes one shell line: the tool's signature, or its name and all arguments, with every string quoted.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.sandbox
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dlite_agent.errors import InvalidRequest

ARGUMENT_BYTES = 120_000  # the kernel takes at most 128 KiB in one argument of a program
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ARGUMENT_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]*")
_END_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_PLACEHOLDER = re.compile(r"\[?<([a-zA-Z_][a-zA-Z0-9_-]*)>\]?")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_templates = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)


class BundleError(InvalidRequest):
    """A bundle cannot be used; `param` is the file and the key at fault, as `file: key`."""

    code = "bundle_error"

    def __init__(self, file: Path, key: str, problem: str) -> None:
        where = f"{file}: {key}" if key else str(file)
        super().__init__(f"{where}: {problem}", param=where)


class Argument(BaseModel):
    """One argument of a tool, as `config.yaml` states it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    type: Literal["string", "integer", "number", "boolean", "array", "object"]
    description: str
    required: bool
    enum: list[str] | None = None
    items: dict[str, Any] | None = None
    argument_format: str | None = None

    def schema_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": self.type, "description": self.description}
        if self.enum is not None:
            entry["enum"] = self.enum
        if self.items is not None:
            entry["items"] = self.items
        return entry

    def check(self, value: object) -> None:
        """Raises InvalidRequest naming the argument unless `value` fits its type and enum."""
        # bool is an int to Python, not to JSON.
        fits = isinstance(value, _PYTHON_TYPES[self.type]) and (self.type == "boolean" or not isinstance(value, bool))
        if not fits:
            raise InvalidRequest(f"{self.name} must be of type {self.type}.", param=self.name)
        if self.enum is not None and value not in self.enum:
            raise InvalidRequest(f"{self.name} must be one of {', '.join(self.enum)}.", param=self.name)
        if isinstance(value, str) and "\0" in value:
            raise InvalidRequest(f"{self.name} cannot hold a NUL character.", param=self.name)

    def render(self, value: object) -> str:
        """`value` as the shell is to read it."""
        if self.argument_format is None:
            return shlex.quote(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return _templates.from_string(self.argument_format).render(value=_quoted(value))


class ToolSpec(BaseModel):
    """One entry below `tools` in `config.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    signature: str | None = None
    docstring: str | None = None
    arguments: list[Argument] = []
    end_name: str | None = None


class BundleConfig(BaseModel):
    """The whole of `config.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: dict[str, ToolSpec] = {}
    state_command: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one tool call gave; times are monotonic seconds of this process.

    Args:
        output: text for the model, bounded.
        exit_code: of the command; None if a limit ended it.
        reason: `exit` or the limit that ended it.
        level: the sandbox level in force; `mcp` for a tool that runs in an MCP server, outside our sandbox.
        note: a sentence for the model if a limit ended the command.
        state: what the bundles' state commands reported after the call, in `state_seconds` that are not part of it.
    """

    tool: str
    output: str
    exit_code: int | None
    reason: str
    level: str
    started: float
    ended: float
    note: str = ""
    elided: int = 0
    full_output: Path | None = None
    state: Mapping[str, Any] | None = None
    state_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A named tool of a bundle."""

    name: str
    spec: ToolSpec
    bundle: Path

    @property
    def template(self) -> str:
        """What is run, with `<argument>` in place of values."""
        return self.spec.signature or " ".join([self.name, *(f"<{argument.name}>" for argument in self.spec.arguments)])

    @property
    def executable(self) -> str:
        return self.template.split(maxsplit=1)[0]

    def schema(self) -> dict[str, Any]:
        """The tool as an OpenAI function schema."""
        arguments = self.spec.arguments
        parameters = {
            "type": "object",
            "properties": {argument.name: argument.schema_entry() for argument in arguments},
            "required": [argument.name for argument in arguments if argument.required],
            "additionalProperties": False,
        }
        description = (self.spec.docstring or "").strip()
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def shell_line(self, values: Mapping[str, Any]) -> str:
        """The shell line of one call.

        Raises:
            InvalidRequest: an argument is unknown, missing, of the wrong type or too long; `param` names it.
        """
        known = {argument.name: argument for argument in self.spec.arguments}
        for name in values:
            if name not in known:
                raise InvalidRequest(f"{self.name} has no argument {name}; it takes {list(known)}.", param=name)
        given = {name: value for name, value in values.items() if value is not None}
        for name, argument in known.items():
            if name in given:
                argument.check(given[name])
            elif argument.required:
                raise InvalidRequest(f"{self.name} needs the argument {name}.", param=name)
        head, newline, body = self.template.strip().partition("\n")
        line = _PLACEHOLDER.sub(lambda found: self._in_line(known, given, found[1]), head).rstrip()
        if self.spec.end_name is None:
            return line + newline + _PLACEHOLDER.sub(lambda found: self._in_line(known, given, found[1]), body)
        text = _PLACEHOLDER.sub(lambda found: self._in_text(given, found[1]), body)
        # Quoting the terminator keeps the shell from reading anything in the text.
        return f"{line} << '{self.spec.end_name}'\n{text}"

    def _in_line(self, known: Mapping[str, Argument], given: Mapping[str, Any], name: str) -> str:
        if name not in given:
            return ""
        rendered = known[name].render(given[name])
        if len(rendered.encode("utf-8", "surrogatepass")) > ARGUMENT_BYTES:
            raise InvalidRequest(f"{name} is longer than {ARGUMENT_BYTES} bytes; pass it in pieces.", param=name)
        return rendered

    def _in_text(self, given: Mapping[str, Any], name: str) -> str:
        text = str(given.get(name, ""))
        if self.spec.end_name in text.splitlines():
            raise InvalidRequest(f"{name} cannot hold a line {self.spec.end_name!r}, which ends the call.", param=name)
        return text


@dataclass(frozen=True, slots=True)
class Bundle:
    """A loaded bundle: its folder and what its `config.yaml` declares."""

    folder: Path
    config: BundleConfig

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def tools(self) -> list[Tool]:
        return [Tool(name, spec, self.folder) for name, spec in sorted(self.config.tools.items())]


def load_bundle(folder: Path) -> Bundle:
    """Read and check one bundle. Raises BundleError naming file and key."""
    file = folder / "config.yaml"
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError as error:
        raise BundleError(file, "", "is missing; a bundle needs one") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BundleError(file, "", f"cannot be read: {error}") from error
    try:
        config = BundleConfig.model_validate(content if content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        raise BundleError(file, _dotted(first["loc"]), first["msg"]) from error
    bundle = Bundle(folder.resolve(), config)
    for tool in bundle.tools:
        _check_tool(file, tool)
    return bundle


def load_bundles(folders: Iterable[Path], hidden: Collection[str] = ()) -> tuple[list[Bundle], dict[str, Tool]]:
    """Several bundles and their tools by name, in name order whatever the order of `folders` (a stable prompt prefix).

    Raises:
        BundleError: a bundle is malformed, or two bundles declare one name.
        InvalidRequest: `hidden` names a tool that no bundle has.
    """
    bundles = [load_bundle(folder) for folder in folders]
    tools: dict[str, Tool] = {}
    homes: dict[str, Path] = {}
    for bundle in bundles:
        file = bundle.folder / "config.yaml"
        if bundle.name in homes:
            raise BundleError(file, "", f"has the same bundle name as {homes[bundle.name]}")
        homes[bundle.name] = bundle.folder
        for tool in bundle.tools:
            if tool.name in tools:
                other = tools[tool.name].bundle / "config.yaml"
                raise BundleError(file, f"tools.{tool.name}", f"is already declared in {other}")
            tools[tool.name] = tool
    for name in hidden:
        if name not in tools:
            raise InvalidRequest(f"No bundle has a tool {name} to hide.", param="hidden")
    return bundles, {name: tools[name] for name in sorted(tools) if name not in hidden}


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice in one mapping, where PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_tool(file: Path, tool: Tool) -> None:
    key = f"tools.{tool.name}"
    if not _TOOL_NAME.fullmatch(tool.name):
        raise BundleError(file, key, "a tool's name has 1 to 64 letters, digits, _ or -")
    optional: str | None = None
    names: set[str] = set()
    for number, argument in enumerate(tool.spec.arguments):
        where = f"{key}.arguments[{number}]"
        if not _ARGUMENT_NAME.fullmatch(argument.name):
            raise BundleError(file, f"{where}.name", "an argument's name has letters, digits, _ or -, no digit first")
        if argument.name in names:
            raise BundleError(file, f"{where}.name", f"{argument.name} is declared twice")
        names.add(argument.name)
        if argument.required and optional is not None:
            raise BundleError(file, f"{where}.required", f"{argument.name} is required, but stands after {optional}")
        optional = optional if argument.required else argument.name
        if argument.items is not None and argument.type != "array":
            raise BundleError(file, f"{where}.items", "only an array has items")
        if argument.enum is not None and argument.type != "string":
            raise BundleError(file, f"{where}.enum", "only a string has an enum")
        try:
            _templates.parse(argument.argument_format or "")
        except jinja2.TemplateSyntaxError as error:
            raise BundleError(file, f"{where}.argument_format", f"is no template: {error}") from error
    _check_signature(file, key, tool, names)
    program = tool.bundle / "bin" / tool.executable
    if not program.is_file() and not (tool.bundle / "install.sh").is_file():
        raise BundleError(file, key, f"its executable bin/{tool.executable} is missing")


def _check_signature(file: Path, key: str, tool: Tool, names: set[str]) -> None:
    if not tool.template.strip() or tool.template.strip().startswith(("<", "[")):
        raise BundleError(file, f"{key}.signature", "must begin with the program to run")
    placed = set(_PLACEHOLDER.findall(tool.template))
    for name in sorted(names - placed):
        raise BundleError(file, f"{key}.signature", f"does not hold the argument {name}")
    for name in sorted(placed - names):
        raise BundleError(file, f"{key}.signature", f"holds {name}, which is no argument")
    end = tool.spec.end_name
    if end is not None and not _END_NAME.fullmatch(end):
        raise BundleError(file, f"{key}.end_name", "has letters, digits, _, . or -")
    if end is not None and tool.template.strip().splitlines()[-1] != end:
        raise BundleError(file, f"{key}.end_name", f"the signature's last line must be {end}")


def _quoted(value: object) -> object:
    """`value` with every string in it quoted for the shell, so that a template may join and print."""
    if isinstance(value, str):
        return shlex.quote(value)
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return shlex.quote(json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else value


def _dotted(location: Iterable[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".")
