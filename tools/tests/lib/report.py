"""Run pytest and turn its JUnit record into a report whose first lines say what failed."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MAX_FAILURES = 10
TRACE_LINES = 25
HEARTBEAT_S = 20.0


def interpreter() -> str:
    """The workspace's own environment if it has one, else the harness's, else the system's."""
    root = Path(os.environ.get("DLITE_WORKSPACE", "."))
    candidates = [root / name / "bin" / "python" for name in (".venv", "venv")]
    candidates += [Path(os.environ["DLITE_PYTHON"])] if "DLITE_PYTHON" in os.environ else []
    return next((str(path) for path in candidates if path.exists()), "python3")


def run(command: list[str]) -> tuple[int, str]:
    """Exit code and output; while tests make progress a line now and then says so, as silence means a hang."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    started = said = time.monotonic()
    chunks = []
    while chunk := os.read(process.stdout.fileno(), 65536):
        chunks.append(chunk)
        now = time.monotonic()
        if now - said >= HEARTBEAT_S:
            print(f"[running for {now - started:.0f} s]", flush=True)
            said = now
    return process.wait(), b"".join(chunks).decode("utf-8", "replace")


def failures(cases: list[ElementTree.Element]) -> list[tuple[str, str, str]]:
    """(name, message, trace) of each failed or broken test."""
    found = []
    for case in cases:
        for kind in ("failure", "error"):
            for node in case.findall(kind):
                name = "::".join(part for part in (case.get("classname", ""), case.get("name", "")) if part)
                found.append((name, node.get("message", "") or kind, node.text or ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="run_tests")
    parser.add_argument("--target")
    parser.add_argument("--keyword")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "junit.xml"
        command = [interpreter(), "-m", "pytest", "-q", "--color=no", "--tb=short", "-p", "no:cacheprovider"]
        command += [f"--junitxml={record}", "-o", "junit_logging=no"]
        command += ["-k", options.keyword] if options.keyword else []
        command += ["--", options.target] if options.target else []
        code, output = run(command)
        try:
            suites = ElementTree.parse(record).getroot()
        except (OSError, ElementTree.ParseError):
            print(f"pytest gave no record (exit code {code}):\n{output[-4000:]}")
            return code or 1
    cases = list(suites.iter("testcase"))
    failed = failures(cases)
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    broken = {name for name, _, _ in failed}
    print(f"{len(broken)} failed, {len(cases) - len(broken) - skipped} passed, {skipped} skipped")
    for name, message, trace in failed[:MAX_FAILURES]:
        lines = trace.rstrip().splitlines()
        cut = [f"[{len(lines) - TRACE_LINES} lines before]"] if len(lines) > TRACE_LINES else []
        print(f"\nFAILED {name}: {message.splitlines()[0][:300]}")
        print("\n".join(f"    {line}" for line in cut + lines[-TRACE_LINES:]))
    if len(failed) > MAX_FAILURES:
        print("\nAlso failed: " + ", ".join(name for name, _, _ in failed[MAX_FAILURES : MAX_FAILURES + 50]))
    if not cases:
        print(output[-2000:])
    return code


if __name__ == "__main__":
    sys.exit(main())
