"""`reproduce.sh`: every command it lists can be read by what would run it; nothing is run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from benchmarks import registry
from benchmarks.scores import BEFORE
from veca.cli.main import app
from veca.distill import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "research" / "reproduce.sh"


def call(*words):
    return subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True)


LISTED = call("--list").stdout
COMMANDS = [shlex.split(line) for line in LISTED.splitlines() if re.match(r" {4}\S", line)]


def test_every_step_says_its_cost():
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    steps = re.findall(r"^  (\S+) \((.+)\)$", LISTED, re.MULTILINE)
    assert len(steps) == len({name for name, _ in steps}) > 40
    for _, cost in steps:
        assert re.search(r"minute|second|hour|not timed", cost)


def test_parts_and_steps_by_name():
    only = call("--list", "pair-1", "pages").stdout
    assert re.findall(r"^  (\S+) \(", only, re.MULTILINE) == ["pair-1", "tables", "plots"]
    for words in (("pair-1", "nothing"), ("--nothing",)):
        told = call(*words)
        assert told.returncode == 2 and "--list" in told.stderr and not told.stdout


def test_runs_come_after_those_they_begin_with():
    seen = set()
    for command in (c for c in COMMANDS if c[:2] == ["veca", "distill"]):
        values = {o: command[i + 1] for i, o in enumerate(command) if o.startswith("--")}
        overrides = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
        path = ROOT / values["--config"]  # or a recipe of the package, by its name
        recipe = path if path.is_file() else values["--config"]
        config = load_config(recipe, overrides=overrides, data=values["--data"])
        students = [config.student, *config.siblings.values()]
        used = [student.init for student in students] + [t.statistics for t in config.teachers]
        assert {Path(path).parts[1] for path in used if path} <= seen, command
        seen.add(Path(values["--out"]).name)
    needed = {*BEFORE, *BEFORE.values()}
    assert needed <= seen


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c)[:60])
def test_commands_can_be_read(command):
    match command:
        case ["veca", name, *words]:
            typer.main.get_command(app).commands[name].make_context(name, words)
        case ["python", "-m", "benchmarks", name, *words]:
            parser = argparse.ArgumentParser()
            registry.module_of(name).add_arguments(parser)
            parser.parse_args(words)
        case ["python", "-m", module, *_]:
            importlib.import_module(module)
        case ["python", file, *_]:
            assert (ROOT / file).is_file()
        case ["cp", source, target]:
            assert source.startswith("runs/") and (ROOT / target).is_file()
        case _:
            raise AssertionError(command)
