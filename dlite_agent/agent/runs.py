"""All runs of a server: started below the allowed roots, journalled, and taken up again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlite_agent.agent.journal import Journal
from dlite_agent.agent.loop import Loop
from dlite_agent.agent.mcp_bundle import McpServer
from dlite_agent.agent.progress import Progress
from dlite_agent.agent.run_log import RunLog
from dlite_agent.agent.run_model import RunModel
from dlite_agent.agent.run_spec import CONTINUABLE, RunSpec
from dlite_agent.agent.sandbox_paths import PathEscape
from dlite_agent.agent.toolbox import PATCH, Toolbox, bundle_folders
from dlite_agent.errors import Conflict, DliteError, InvalidRequest, NotFound
from dlite_agent.paths import content_dir

log = logging.getLogger("dlite_agent.runs")


@dataclass(frozen=True)
class RunsSettings:
    """Where runs may work and what they may use.

    Attributes:
        roots: workspaces lie below one of these; none allowed means no run is.
        bundles: folders that hold further bundles, beside those of `tools/`.
        mcp: servers mounted into every run.
        allow_plain: let a run ask for no sandbox at all.
        max_active: runs at work at once.
        content: keep prompts, answers and tool output in the runs' event logs.
    """

    roots: tuple[Path, ...] = ()
    bundles: tuple[Path, ...] = ()
    mcp: tuple[McpServer, ...] = ()
    allow_plain: bool = False
    max_active: int = 32
    content: bool = True


MakeModel = Callable[[str, str], RunModel]
"""A model for a run, from the run's id and its owner."""


@dataclass
class AgentRun:
    """One run and what of it is alive in this process."""

    id: str
    owner: str
    spec: RunSpec
    folder: Path
    created: float
    workspace: Path
    journal: Journal
    log: RunLog
    progress: Progress
    key: str = ""
    level: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    loop: Loop | None = None
    task: asyncio.Task[None] | None = None

    @property
    def at_rest(self) -> bool:
        """Nothing in this process works on it."""
        return self.task is None or self.task.done()

    @property
    def state(self) -> str:
        """running, pausing, paused, interrupted (nothing works on it), or its end."""
        if self.progress.end is not None and (self.at_rest or not self.progress.waiting):
            return str(self.progress.end)
        if self.at_rest:
            return "interrupted"
        if self.progress.paused:
            return "paused" if self.loop is not None and self.loop.resting else "pausing"
        return "running"

    @property
    def patch(self) -> str | None:
        """The submitted patch."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / PATCH).read_text(errors="replace")
        return None


class Runs:
    """The runs of one process. To be used from its event loop; `recover` first, `close` in the end.

    Args:
        make_model: makes the model of a run.
        data_dir: folder that outlives the process; None keeps runs in a temporary one.
    """

    def __init__(self, settings: RunsSettings, make_model: MakeModel, data_dir: Path | None) -> None:
        self._settings = settings
        self._make_model = make_model
        self._temporary = None if data_dir else tempfile.TemporaryDirectory(prefix="dlite-runs-")
        self._folder = data_dir / "runs" if data_dir else Path(self._temporary.name)  # type: ignore[union-attr]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs: dict[str, AgentRun] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._starting = asyncio.Lock()
        self._bundles = known_bundles(settings.bundles)

    async def recover(self) -> None:
        """Read the runs of earlier processes and go on with those that had not ended."""
        for folder in sorted(self._folder.iterdir()):
            if not (folder / "journal.jsonl").is_file():
                continue
            try:
                run = self._read(folder)
            except (DliteError, KeyError, ValueError) as error:
                log.error("a run cannot be read", extra={"dlite": {"run": folder.name, "error": str(error)}})
                continue
            if run.progress.end is None or (run.progress.waiting and run.progress.end in CONTINUABLE):
                try:
                    await run.journal.append({"kind": "process", "wall": time.time()})
                    run.progress.restarts += 1
                    await self._work_on(run)
                except DliteError as error:
                    log.error("a run cannot go on", extra={"dlite": {"run": run.id, "error": error.message}})

    async def start(self, spec: RunSpec, owner: str, key: str = "") -> AgentRun:
        """Begin a run; with a key that was used before, give the run that it began.

        Raises:
            InvalidRequest, PathEscape, NotFound: workspace, bundles or sandbox cannot be had as asked.
            Conflict: the key came with another body, the workspace is in use, or too many runs are at work.
            SandboxUnavailable: no permitted level works here.
        """
        async with self._starting:
            if key and (owner, key) in self._keys:
                earlier = self._runs[self._keys[owner, key]]
                if earlier.spec != spec:
                    raise Conflict("This idempotency key began a run with another body.", param="idempotency-key")
                return earlier
            workspace = self._workspace(spec.workspace)
            active = [run for run in self._runs.values() if not run.at_rest]
            if len(active) >= self._settings.max_active:
                raise Conflict(f"{len(active)} runs are at work; wait for one to end, or cancel it.", param="runs")
            for run in active:
                if run.workspace.is_relative_to(workspace) or workspace.is_relative_to(run.workspace):
                    raise Conflict(f"The run {run.id} is at work in this workspace.", param="workspace")
            return await self._begin(spec, owner, key, workspace)

    async def _begin(self, spec: RunSpec, owner: str, key: str, workspace: Path) -> AgentRun:
        identity = f"run_{uuid.uuid4().hex}"
        tools = await self._open_tools(spec, workspace, self._folder / identity)
        folder = self._folder / identity
        journal = Journal(folder / "journal.jsonl")
        created = time.time()
        head = {"kind": "run", "id": identity, "owner": owner, "key": key, "created": created}
        await journal.append({**head, "workspace": str(workspace), "spec": spec.model_dump(mode="json")})
        run = AgentRun(
            identity, owner, spec, folder, created, workspace, journal, self._open_log(folder), Progress(), key
        )
        self._add(run)
        self._launch(run, tools)
        return run

    def get(self, owner: str, identity: str) -> AgentRun:
        """A run by its id. Raises NotFound, also for another owner's."""
        run = self._runs.get(identity)
        if run is None or run.owner != owner:
            raise NotFound(f"There is no run {identity!r}.", param="run_id")
        return run

    def list(self, owner: str) -> list[AgentRun]:
        """An owner's runs, the latest first."""
        return sorted((run for run in self._runs.values() if run.owner == owner), key=lambda run: -run.created)

    async def pause(self, run: AgentRun) -> None:
        """Stop before the next turn. Raises Conflict when the run has ended."""
        await self._living(run).pause()

    async def resume(self, run: AgentRun) -> None:
        """Go on with a paused run. Raises Conflict when it has ended."""
        await self._living(run).resume()

    async def cancel(self, run: AgentRun) -> None:
        """End a run now, its tools and turn included; of one that has ended, nothing changes."""
        if run.loop is None or run.task is None or run.at_rest:
            return
        run.loop.cancelled = True
        run.task.cancel()
        await asyncio.wait({run.task})

    async def follow_up(self, run: AgentRun, content: str, key: str = "") -> None:
        """A further message of the user's. A run that was submitted or answered goes on.

        Raises:
            Conflict: the run has ended otherwise.
        """
        identity = hashlib.sha256(key.encode()).hexdigest()[:24] if key else uuid.uuid4().hex
        if any(record.get("kind") == "follow_up" and record["id"] == identity for record in run.journal.records):
            return
        if run.task is not None and run.loop is not None and run.loop.over:
            await asyncio.wait({run.task})
        ended = run.at_rest
        if ended and run.progress.end not in CONTINUABLE:
            raise Conflict(f"The run has ended ({run.state}); start a new one.", param="run_id")
        record = {"kind": "follow_up", "id": identity, "content": content}
        if not ended:
            assert run.loop is not None
            await run.loop.follow_up(identity, content)
        else:
            await run.journal.append(record)
            run.progress.apply(record)
            await self._work_on(run)
        run.journal.records.append(record)

    def _living(self, run: AgentRun) -> Loop:
        if run.loop is None or run.at_rest:
            raise Conflict(f"The run is not at work ({run.state}).", param="run_id")
        return run.loop

    async def close(self) -> None:
        """Stop all work; runs that have not ended go on when a server with the same data folder starts."""
        tasks = [run.task for run in self._runs.values() if run.task is not None and not run.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in self._runs.values():
            run.log.close()
            run.journal.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def stop_streams(self) -> None:
        """Tell all live streams to end."""
        for run in self._runs.values():
            run.log.stop_streams()

    # Making and remaking runs.

    def _workspace(self, given: str) -> Path:
        """The workspace's folder, links resolved. Raises PathEscape and InvalidRequest."""
        if not self._settings.roots:
            raise InvalidRequest("No folder is allowed for workspaces; start the server with one.", param="workspace")
        for root in self._settings.roots:
            allowed = root.resolve()
            try:
                found = (allowed / given).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                continue
            if found.is_relative_to(allowed):
                if not found.is_dir():
                    raise InvalidRequest(f"{given} is not a folder.", param="workspace")
                own = self._folder.resolve()
                if found.is_relative_to(own) or own.is_relative_to(found):
                    raise PathEscape(f"{given} holds, or lies in, the server's own data.", param="workspace")
                return found
        raise PathEscape(f"{given} is no folder below an allowed root.", param="workspace")

    async def _open_tools(self, spec: RunSpec, workspace: Path, folder: Path) -> Toolbox:
        if spec.sandbox == "plain" and not self._settings.allow_plain:
            raise InvalidRequest("This server does not run tools without a sandbox.", param="sandbox")
        folders = bundle_folders(spec.bundles, self._bundles)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            tools = await Toolbox.open(spec, workspace, folders, folder, self._settings.mcp)
        except BaseException:
            if not (folder / "journal.jsonl").exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if tools.root != workspace:
            await tools.close()
            raise PathEscape("The workspace was replaced while the run began.", param="workspace")
        return tools

    def _open_log(self, folder: Path) -> RunLog:
        return RunLog(folder / "events.jsonl", folder.name, content=self._settings.content)

    def _read(self, folder: Path) -> AgentRun:
        journal = Journal(folder / "journal.jsonl")
        try:
            if not journal.records:
                raise InvalidRequest("The journal is empty.", param="journal")
            head, *records = journal.records
            progress = Progress()
            for record in records:
                progress.apply(record)
            spec = RunSpec.model_validate(head["spec"])
            place = (spec, folder, head["created"], Path(head["workspace"]), journal)
            run = AgentRun(head["id"], head["owner"], *place, self._open_log(folder), progress, head["key"])
        except BaseException:
            journal.close()
            raise
        self._add(run)
        return run

    def _add(self, run: AgentRun) -> None:
        self._runs[run.id] = run
        if run.key:
            self._keys[run.owner, run.key] = run.id

    async def _work_on(self, run: AgentRun) -> None:
        self._launch(run, await self._open_tools(run.spec, self._workspace(str(run.workspace)), run.folder))

    def _launch(self, run: AgentRun, tools: Toolbox) -> None:
        model = self._make_model(run.id, run.owner)
        run.level, run.refused = tools.level, tools.refused
        loop = run.loop = Loop(run.spec, model, tools, run.journal, run.log, run.progress)

        async def work() -> None:
            try:
                end = await loop.run()
                while end in CONTINUABLE and run.progress.waiting:
                    end = await loop.run()
            except Exception:
                log.exception("a run stopped", extra={"dlite": {"run": run.id}})
            finally:
                loop.over = True
                await tools.close()

        run.task = asyncio.create_task(work(), name=run.id)
        # Watchers leave once nothing works on the run, so they have to hear of that moment.
        run.task.add_done_callback(lambda _: run.log.signal("state"))


def known_bundles(more: Sequence[Path] = ()) -> dict[str, Path]:
    """Bundles by name: those of `tools/` and of further folders. Raises InvalidRequest for a name given twice."""
    found: dict[str, Path] = {}
    for folder in (content_dir("tools"), *more):
        for bundle in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (bundle / "config.yaml").is_file():
                if bundle.name in found:
                    raise InvalidRequest(f"The bundle {bundle.name} is there twice.", param="bundles")
                found[bundle.name] = bundle
    return found
