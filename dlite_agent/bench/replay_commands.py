"""What `dlite-agent replay` does: recordings read, settings applied, the engine started, sides played and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dlite_agent.agent.run_spec import RunLimits
from dlite_agent.bench.replay import DecodeReplay, Plan, Progress, Side, Wait
from dlite_agent.bench.replay_tools import replay_tools
from dlite_agent.config import ModelSettings, SchedulerSettings
from dlite_agent.decode.engine import Engine
from dlite_agent.decode.grammar import Grammars
from dlite_agent.decode.load import Runtime, load_runtime
from dlite_agent.decode.rounds import StepFigures
from dlite_agent.decode.sampling import SamplingParams
from dlite_agent.decode.step_times import Probe, measure
from dlite_agent.errors import DliteError, InvalidRequest
from dlite_agent.session.template import ChatTemplate
from dlite_agent.trace.comparison import comparisons, tool_replays
from dlite_agent.trace.events import AnyEvent
from dlite_agent.trace.formats import load
from dlite_agent.trace.log import Log
from dlite_agent.trace.phases import timelines
from dlite_agent.trace.replay_table import replay_json, replay_table, tools_json, tools_table
from dlite_agent.trace.script import NotReplayable, Script, scripts

_SAMPLING = frozenset(item.name for item in fields(SamplingParams))
_SCHEDULER = frozenset(item.name for item in fields(SchedulerSettings))
_MODEL = frozenset({"target", "drafter", "dtype", "device", "threads", "kv_budget", "context_limit"})
_MARGIN = 1.25  # T_AR is measured up to a little beyond the longest context of the recordings


@dataclass(frozen=True)
class Changes:
    """What `--set key=value` changes: how turns are sampled, the scheduler, the model."""

    sampling: dict[str, Any] = field(default_factory=dict)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)


def read_scripts(paths: Sequence[Path], session: str | None = None, copies: int = 1) -> list[Script]:
    """The recorded sessions of some files of any importable format.

    Args:
        session: only the one with this id.
        copies: how often each is played.

    Raises:
        NotFound: a file is missing. NotReplayable: no such session, or none that answered a turn.
    """
    found = [script for path in paths for script in scripts(load(path))]
    names = ", ".join(script.session for script in found)
    if session is not None:
        found = [script for script in found if script.session == session]
        if not found:
            raise NotReplayable(f"There is no session {session!r}; there are: {names or 'none'}.", param="session")
    if not found:
        raise NotReplayable("The files hold no session with an answered turn.", param="session")
    if copies < 1:
        raise InvalidRequest("copies must be at least 1.", param="copies")
    if copies == 1:
        return found
    return [replace(script, session=f"{script.session}#{copy + 1}") for script in found for copy in range(copies)]


def read_changes(settings: Sequence[str], model: ModelSettings) -> Changes:
    """`key=value` settings. Raises InvalidRequest for a key that does not exist or a value that cannot be."""
    sampling: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign:
            raise InvalidRequest(f"A setting is key=value, not {setting!r}.", param="set")
        groups = ((_SAMPLING, sampling), (_SCHEDULER, scheduler), (_MODEL, models))
        group = next((values for names, values in groups if key in names), None)
        if group is None:
            known = ", ".join(sorted(_SAMPLING | _SCHEDULER | _MODEL))
            raise InvalidRequest(f"There is no setting {key!r}; there are {known}.", param="set")
        try:
            group[key] = json.loads(text)
        except ValueError:
            group[key] = text
    try:
        SamplingParams(**sampling)
        return Changes(sampling, SchedulerSettings(**scheduler), replace(model, **models))
    except TypeError as error:
        raise InvalidRequest(f"A setting has a value of another kind: {error}.", param="set") from error


def arrivals(scripts: Sequence[Script], given: str, plan: Plan) -> list[float]:
    """Seconds after the first at which each session begins: as recorded, or so many seconds apart."""
    if given == "original":
        starts = [script.start for script in scripts]
        known = [start for start in starts if start is not None]
        if len(known) < len(starts):
            raise NotReplayable(
                "A recording has no wall-clock time: name the seconds between arrivals.", param="arrivals"
            )
        return [(start - min(known)) / (plan.speed if plan.wait == "scaled" else 1.0) for start in known]
    try:
        gap = float(given)
    except ValueError:
        gap = -1.0
    if not 0.0 <= gap < 1e6:
        raise InvalidRequest(f"arrivals is 'original' or seconds, not {given!r}.", param="arrivals")
    return [gap * number for number in range(len(scripts))]


def replay_decode(
    found: Sequence[Script],
    sides: Sequence[Side],
    changes: Changes,
    *,
    wait: Wait = "none",
    speed: float = 1.0,
    at_once: str | None = None,
    progress: Progress = lambda _: None,
) -> Log:
    """Replay sessions with the model for real; the log of all sides.

    T_AR is measured first, at the contexts of the recordings and at batch 1, 2 and so on for sessions at once.

    Raises:
        NotReplayable: a recording lacks what is needed.
        DliteError: the model cannot be loaded, or a turn failed.
    """
    plan = Plan(sides, changes.sampling, wait, speed)
    if at_once is not None:
        plan = replace(plan, arrivals=arrivals(found, at_once, plan))
    for script in found:
        script.need_ids()
    drafting = any(side.mode == "dlite" for side in sides)
    longest = max(len(turn.prompt_ids or ()) + len(turn.output_ids or ()) for script in found for turn in script.turns)
    batches = [1] if plan.arrivals is None else [n for n in (1, 2, 4, 8, 16) if n < 2 * len(found)]
    points: list[tuple[int, int, float, float]] = []

    def start() -> Runtime:
        progress("loading the model")
        runtime = _load(changes.model, drafting)
        progress("measuring T_AR")
        contexts = sorted({max(16, int(longest * share)) for share in (0.1, 0.5, _MARGIN)})
        points.extend(measure(runtime.decoder, contexts, batches))
        return runtime

    probe = Probe(every=24)

    def observe(step: StepFigures) -> None:
        probe(step)

    engine = Engine(changes.scheduler, start, observer=observe)
    runtime = engine.start()
    try:
        replay = DecodeReplay(engine, plan, points=points, grammars=_grammars(runtime), progress=progress)
        return replay.run(found)
    finally:
        engine.close()


async def replay_all_tools(
    found: Sequence[Script], workspace: Path | None, limits: RunLimits, progress: Progress = lambda _: None
) -> Log:
    """Run the tools of some sessions again, one session after the other, each on a copy of the workspace."""
    events: list[AnyEvent] = []
    for script in found:
        log = await replay_tools(script, workspace, limits=limits, progress=progress)
        events += log.events
    return Log(events)


def present(log: Log, found: Sequence[Script], mode: str, fmt: str) -> str:
    """What a replay found, as a table or as JSON."""
    if mode == "tools":
        replays = tool_replays(found, timelines(log))
        return tools_json(replays) if fmt == "json" else tools_table(replays)
    compared = comparisons(timelines(log))
    return replay_json(compared) if fmt == "json" else replay_table(compared)


def _load(model: ModelSettings, drafting: bool) -> Runtime:
    runtime = load_runtime(
        target=model.target,
        drafter=model.drafter if drafting else "none",
        dtype=model.dtype,
        device=model.device,
        threads=model.threads,
        kv_budget=model.kv_budget,
        context_limit=model.context_limit,
        anchor_group_size=model.anchor_group_size,
    )
    if drafting and runtime.decoder.drafter is None:
        raise DliteError("No drafter fits the target, so there is no dlite side: name one, or compare ar alone.")
    return runtime


def _grammars(runtime: Runtime) -> Callable[[], Grammars]:
    made: list[Grammars] = []

    def grammars() -> Grammars:
        if not made:
            spec = runtime.decoder.target.spec
            stops = ChatTemplate(runtime.tokenizer, spec.eos_ids).stop_ids
            made.append(Grammars(runtime.tokenizer, vocab_size=spec.vocab_size, stop_ids=stops))
        return made[0]

    return grammars
