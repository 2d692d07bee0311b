"""Prompts that need no file: programming questions, and tracebacks produced by really running faulty code."""

from __future__ import annotations

import contextlib
import io
import random
import traceback

from dlite_agent.train.prompts import Prompt
from dlite_agent.train.sources import Source

_SUBJECTS = """
binary search in a sorted list|a linked list with insert and delete|a thread-safe counter|a rate limiter|an LRU cache
reading a CSV file line by line|parsing command-line arguments|merging two dictionaries|counting words in a file
a retry decorator with backoff|a context manager that times a block|a simple HTTP client|an event emitter
validating an e-mail address|matching balanced brackets|the Fibonacci sequence|primes up to n|matrix multiplication
flattening nested lists|a priority queue|breadth-first search on a graph|topological sorting|a trie for prefix search
walking a directory tree|watching a file for changes|a configuration loader for TOML|a JSON pretty-printer
a progress bar in the terminal|a worker pool with a queue|an async producer and consumer|streaming a large download
computing a checksum of a file|comparing two version strings|a date range iterator|rounding money correctly
splitting text into chunks|a sliding window over a list|removing duplicates but keeping the order|a ring buffer
a state machine for orders|a bank account class|a stack with a minimum|rotating a list|transposing a table
sorting a dictionary by value|grouping records by key|finding the longest common prefix|reversing words in a sentence
converting Roman numerals|a calculator for simple expressions|tokenising source code|rendering a template
a REST endpoint that lists users|a SQL schema for a shop|an SQL query with a join|a migration that adds a column
a Dockerfile for a Python service|a Makefile with test and lint targets|a GitHub Actions workflow|a systemd unit
a shell script that backs up a folder|a shell loop over files|finding large files with the shell|a git pre-commit hook
undoing the last git commit|resolving a merge conflict|squashing commits|a git bisect session|tagging a release
regular expressions for log lines|unit tests with fixtures|mocking the clock in a test|property-based tests
type hints for a generic function|dataclasses and frozen records|abstract base classes|iterators and generators
exceptions and when to raise them|logging with levels|virtual environments|packaging a library|semantic versioning
reading environment variables|a plugin system|dependency injection|feature flags|pagination of an API
hashing passwords|signing a token|escaping HTML|preventing SQL injection|rate limits and retries
memory leaks in Python|profiling slow code|caching results|vectorising a loop|choosing a data structure
a binary tree and its traversals|Dijkstra's shortest path|knapsack by dynamic programming|edit distance|quicksort
merge sort|heap sort|a bloom filter|consistent hashing|a simple tokenizer|a Markov text generator|tic-tac-toe
the game of life|a to-do list application|a URL shortener|a chat server|a key-value store|a job scheduler|a web crawler
"""
SUBJECTS = [subject.strip() for line in _SUBJECTS.strip().splitlines() for subject in line.split("|")]
_FORMS: tuple[tuple[str, str], ...] = (
    ("write", "Write a {language} function for {subject}."),
    ("write", "Write {language} code for {subject}, with comments."),
    ("write", "Implement {subject} in {language} and show how to call it."),
    ("write", "Give a complete, runnable {language} example of {subject}."),
    ("question", "Explain {subject} to a junior developer."),
    ("question", "What are common mistakes with {subject}?"),
    ("question", "Give step-by-step instructions for {subject}."),
    ("tests", "Write tests for {subject} in {language}."),
    ("plan", "Plan the work: I want {subject} in my project. List the files to change and why."),
    ("json", 'Return a JSON object with keys "title", "steps" and "risks" about {subject}.'),
    ("shell", "Which shell commands help me with {subject}? Show them in one code block."),
    ("question", "Compare two ways of doing {subject}; use a table."),
)
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "TypeScript", "Go", "Rust", "C", "Java", "Bash")


def questions(*, seed: int) -> list[Prompt]:
    """Every subject in every form, shuffled; a subject is one source, so that it stays on one side of the split."""
    rng = random.Random(f"{seed} questions")
    prompts = []
    for subject in SUBJECTS:
        for kind, form in _FORMS:
            text = form.format(language=rng.choice(_LANGUAGES), subject=subject)
            prompts.append(Prompt(f"question: {subject}", kind, [{"role": "user", "content": text}]))
    rng.shuffle(prompts)
    return prompts


_FAULTS = r"""
import json; json.loads('{"name": "%(word)s", "size": }')
import json; json.dumps({"%(word)s": object()})
int("%(word)s")
[1, 2, 3][%(number)d]
{"a": 1}["%(word)s"]
import os; os.listdir("/%(word)s/%(number)d")
open("no-such-%(word)s.txt").read()
import missing_%(word)s
from collections import %(word)s
"%(word)s" + %(number)d
%(number)d / 0
None.%(word)s
import datetime; datetime.date(2024, 13, %(number)d)
import datetime; datetime.datetime.strptime("%(word)s", "%%Y-%%m-%%d")
import configparser; configparser.ConfigParser().read_string("%(word)s = 1")
import argparse; argparse.ArgumentParser(exit_on_error=False).parse_args(["--%(word)s"])
import subprocess; subprocess.run(["no-such-%(word)s", "--version"], check=True)
import subprocess, sys; subprocess.run([sys.executable, "-c", "raise SystemExit(%(number)d)"], check=True)
import decimal; decimal.Decimal("%(word)s")
import ipaddress; ipaddress.ip_address("10.0.0.%(number)d00")
import socket; socket.create_connection(("127.0.0.1", 1), timeout=1)
import asyncio; asyncio.run(asyncio.wait_for(asyncio.sleep(1), 0.001))
import statistics; statistics.mean([])
import re; re.compile("(%(word)s")
import ast; ast.parse("def %(word)s(:")
import base64; base64.b64decode("%(word)s=", validate=True)
import uuid; uuid.UUID("%(word)s")
import pathlib; pathlib.Path("/proc/no-such-%(word)s").write_text("x")
import sqlite3; sqlite3.connect(":memory:").execute("select %(word)s from t")
import sqlite3; sqlite3.connect(":memory:").execute("selct 1")
import tomllib; tomllib.loads("%(word)s = ")
import xml.etree.ElementTree as e; e.fromstring("<%(word)s>")
import zipfile; zipfile.ZipFile(__import__("io").BytesIO(b"%(word)s"))
import hashlib; hashlib.new("%(word)s")
import unicodedata; unicodedata.name("\x00")
import enum; enum.Enum("E", "a b")("%(word)s")
import dataclasses; dataclasses.make_dataclass("D", ["a"])(1, %(number)d)
def f(x): return f(x + 1)\nf(%(number)d)
def load(path):\n    return parse(path)\ndef parse(path):\n    return int(path)\nload("%(word)s")
class Store:\n    def get(self, key):\n        return self.items[key]\nStore().get("%(word)s")
assert sum([1, 2]) == %(number)d, "sum of %(word)s differs"
raise ValueError("unknown option: %(word)s")
import math; math.sqrt(-%(number)d)
import struct; struct.unpack("<I", b"%(word)s!")
import inspect; inspect.signature(%(number)d)
import shutil; shutil.copy("no-such-%(word)s.cfg", "/nowhere/%(word)s.cfg")
import urllib.request; urllib.request.urlopen("%(word)s")
import http.client; http.client.HTTPConnection("127.0.0.1", 1, timeout=1).request("GET", "/%(word)s")
import csv; list(csv.reader(["a\0b", 3]))
import random; random.sample(range(3), %(number)d)
import itertools; next(itertools.islice([], %(number)d, None))
import functools; functools.reduce(lambda a, b: a + b, [])
"""
_WORDS = [
    "config",
    "users",
    "report",
    "session",
    "build",
    "parser",
    "worker",
    "cache",
    "token",
    "metrics",
    "schema",
    "backup",
    "deploy",
    "client",
    "ledger",
    "index",
]


def tracebacks(count: int, *, seed: int) -> list[Source]:
    """Tracebacks of small faulty programs, really run. One program with one set of words is one source."""
    rng = random.Random(f"{seed} tracebacks")
    programs = [line.replace("\\n", "\n") for line in _FAULTS.strip().splitlines()]
    sources: list[Source] = []
    for i in range(count):
        code = programs[i % len(programs)] % {"word": rng.choice(_WORDS), "number": rng.randint(4, 99)}
        name = f"{rng.choice(_WORDS)}/{rng.choice(_WORDS)}.py"
        output = ""
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            try:
                exec(compile(code, name, "exec"), {"__name__": "__main__"})
            except Exception as error:
                trace = error.__traceback__.tb_next if error.__traceback__ else None
                lines = traceback.format_exception(type(error), error, trace)
                output = "".join(lines[:12] + lines[-6:] if len(lines) > 18 else lines)
        if output:
            text = f"$ python {name}\n{output}"
            sources.append(Source(f"traceback: {i % len(programs)}", "log", text))
    return sources
