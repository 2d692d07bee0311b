"""Request fields that several API shapes share, and how a body is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from dlite_agent.api import problems
from dlite_agent.api.service import Ask, Caller, Service
from dlite_agent.config import Mode
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.errors import InvalidRequest, NotFound
from dlite_agent.session.identity import session_name
from dlite_agent.session.messages import JSON, check_fields


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):  # Python's 0 equals False.
        raise ValueError("must be false")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
"""A whole number; JSON does not tell 6 from 6.0."""
Name = Annotated[str, Field(min_length=1, max_length=256)]
Off = Annotated[Literal[False], BeforeValidator(_boolean)]
"""An option that can only be off."""
TokenCount = Annotated[Int, Field(ge=1, le=1 << 40)]
Texts = Annotated[list[str], Field(max_length=16)]
Bias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]

MAX_CHOICES = 16
MAX_TOP_SCORES = 20


class Strict(BaseModel):
    """A body or part of one: a wrong type or an unknown field is refused, by name."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DliteOptions(Strict):
    """Our own options, in a request's `dlite` field.

    mode, verify_window, verification: how to decode; on_conflict: what to do when the session has a turn in flight;
    timeout: seconds, at least 1, until the request is given up, queue included.
    """

    mode: Mode | None = None
    verify_window: Annotated[Int, Field(ge=1, le=64)] | None = None
    verification: Literal["match", "rejection"] = "match"
    on_conflict: Literal["refuse", "wait"] | None = None
    timeout: Annotated[float, Field(ge=1, le=86400)] | None = None


class Sampling(Strict):
    """Fields of sampling, under the names that OpenAI, vLLM and others share."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=1 << 31)] | None = None


class Penalties(Strict):
    """Fields of sampling beyond `Sampling`."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Bias | None = None


class ModelRequest(Strict):
    """A body that says which model it is for."""

    model: str


class TurnRequest(Sampling, ModelRequest):
    """What every shape has: the model, sampling, and by which names it may tell its session (see docs/api.md)."""

    stream: bool | None = None
    session_id: Name | None = None
    prompt_cache_key: Name | None = None
    program_id: Name | None = None
    dlite: DliteOptions | None = None


def sampling(fields: Sampling, options: DliteOptions) -> SamplingParams:
    """Sampling parameters with the APIs' default temperature of 1. Raises InvalidRequest."""
    values: dict[str, Any] = {
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "top_k": max(fields.top_k or 0, 0),
        "verification": options.verification,
    }
    if isinstance(fields, Penalties):
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := getattr(fields, name)) is not None:
                values[name] = value
        if fields.seed is not None:
            values["seed"] = fields.seed % 2**63
        if fields.logit_bias:
            values["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    return SamplingParams(**values)


def begin(api: str, request: Request, fields: TurnRequest, hints: Sequence[str]) -> Ask:
    """What all shapes ask in the same words: sampling, the session's name, our own options.

    Args:
        hints: fields that are accepted and change nothing; those that were sent are named in the response.

    Raises:
        InvalidRequest: a value cannot be honoured.
    """
    options = fields.dlite or DliteOptions()
    names = {"session_id": fields.session_id, "prompt_cache_key": fields.prompt_cache_key}
    return Ask(
        api=api,
        params=sampling(fields, options),
        name=session_name(dict(request.headers), {**names, "program_id": fields.program_id}),
        on_conflict=options.on_conflict,
        mode=options.mode,
        verify_window=options.verify_window,
        seconds=options.timeout,
        stream=bool(fields.stream),
        warnings=[f"{name} has no effect on this server" for name in hints if getattr(fields, name) is not None],
    )


M = TypeVar("M", bound=BaseModel)


async def read(request: Request, model: type[M]) -> M:
    """A request's body as a model.

    Raises:
        InvalidRequest: it is no JSON of that shape; `param` names the field.
    """
    raw = await request.body()
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (byte {error.start}).") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise problems.from_pydantic(error) from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def service_of(request: Request) -> Service:
    """What the application's lifespan made."""
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """Who asks, as the gate found out."""
    return Caller(request.state.owner, request.state.request_id)


N = TypeVar("N", bound=ModelRequest)


async def read_served(request: Request, model: type[N]) -> N:
    """As `read`, for a body that names a model. Raises NotFound also where another one is served."""
    fields = await read(request, model)
    check_model(fields.model, service_of(request).names)
    return fields


def check_model(model: str, names: Sequence[str]) -> None:
    """Raise NotFound unless the model is one of the served names."""
    if model not in names:
        raise NotFound(f"The model {model!r} is not served here; served is {', '.join(names)}.", param="model")


@dataclass(frozen=True)
class Tools:
    """A request's function tools in OpenAI's shape, and what was left out."""

    functions: list[JSON]
    warnings: list[str]


Definition = Callable[[dict[str, Any], str], tuple[JSON, str]]
"""From a tool and its place in the request to its function (name, description, parameters, strict), and its place."""


def read_tools(tools: Sequence[Any] | None, types: Sequence[str | None], only: str, definition: Definition) -> Tools:
    """A request's tools of some types; the others are skipped with a warning that `only` those are supported.

    Raises:
        InvalidRequest: a tool is malformed.
    """
    functions: list[JSON] = []
    warnings = []
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{where} must be an object.", param=where)
        kind = tool.get("type")
        if kind not in types:
            if not isinstance(kind, str):
                raise InvalidRequest(f"{where}.type must be a string.", param=f"{where}.type")
            warnings.append(f"{where} of type {kind!r} was skipped: only {only} are supported")
            continue
        functions.append({"type": "function", "function": checked_function(*definition(tool, where))})
    return Tools(functions, warnings)


def function_tools(tools: Sequence[Any] | None) -> Tools:
    """Function tools of a chat request. Raises InvalidRequest, see `read_tools`."""
    return read_tools(tools, ("function",), "function tools", _nested)


def _nested(tool: dict[str, Any], where: str) -> tuple[JSON, str]:
    check_fields(tool, where, "function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object.", param=f"{where}.function")
    return function, f"{where}.function"


_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def is_function_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 256


def checked_function(function: JSON, where: str) -> dict[str, Any]:
    """A function definition with only the keys that mean something here. Raises InvalidRequest."""
    if not is_function_name(function.get("name")):
        raise InvalidRequest(f"{where}.name must be a string of 1 to 256 characters.", param=f"{where}.name")
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{where}.{key} must be of type {kind.__name__}.", param=f"{where}.{key}")
    check_fields(function, where, *_FUNCTION_FIELDS)
    return {key: function[key] for key in _FUNCTION_FIELDS if function.get(key) is not None}
