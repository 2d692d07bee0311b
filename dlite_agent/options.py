"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Option(help="Model folder, GGUF file, hub id, or the default target's name.")]
DrafterOption = Annotated[str, typer.Option(help="Checkpoint folder, auto (the shipped one that fits), or none.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, packed, fp16w (both CPU only) or auto (measured).")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own choice by default.")]
Prompts = Annotated[Path, typer.Option(help='JSONL, one {"id", "messages"} a line.')]
GroupSize = Annotated[int | None, typer.Option(help="G of a checkpoint whose config lacks it, if you know it.")]
Window = Annotated[int | None, typer.Option(help="Rows of a verify pass; shortens the draft too.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
