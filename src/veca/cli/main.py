"""The `veca` command: registers one function a file, and turns errors into one line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from veca.cli.bench import bench
from veca.cli.cache import cache
from veca.cli.calibrate import calibrate
from veca.cli.common import PointOptions, takes_max_pixels, takes_point
from veca.cli.datasets import datasets
from veca.cli.demo import demo
from veca.cli.distill import distill
from veca.cli.embed import embed
from veca.cli.export import export
from veca.cli.features import features
from veca.cli.import_ import import_
from veca.cli.info import info
from veca.cli.large import large
from veca.cli.pack import pack
from veca.cli.probe import probe
from veca.cli.publish import publish
from veca.cli.quantize import quantize
from veca.cli.quickstart import quickstart
from veca.cli.read import read
from veca.cli.recipes import recipes
from veca.cli.report import report
from veca.cli.search import search
from veca.cli.tune import tune
from veca.cli.viz import viz
from veca.errors import InputError, VecaError, VecaWarning, suggest


class _Switches:
    """Shows switches as switches: help would name a type, as if a value belonged there."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for switch in filter(_is_switch, params):
            switch.metavar = ""
        return params


def _is_switch(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


class _Commands(_Switches, TyperGroup):
    """Answers a name that no command has with the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise InputError(f"No such command {suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class _Command(_Switches, TyperCommand):
    """Refuses a value behind a switch, which would else be taken for a file."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        switches = {name: one for one in self.params if _is_switch(one) for name in one.opts}
        for name, word in pairwise(args):
            if name == "--":
                break
            if name not in switches or word.lower() not in _YES | _NO or Path(word).exists():
                continue
            off = switches[name].secondary_opts
            instead = f"leave out {word!r}"
            if word.lower() in _NO:
                instead = f"say {off[0]}" if off else f"leave out {name}"
            raise InputError(f"{name} is a switch and takes no value; {instead}.")
        return super().parse_args(ctx, args)


_YES, _NO = {"true", "yes", "on"}, {"false", "no", "off"}

app = typer.Typer(
    name="veca",
    cls=_Commands,
    help="Dense vision features through a few elastic cores, at a cost you can dial.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Typer's own, wherever it keeps it: recent versions carry a copy of click inside.
_UsageError: Any = typer.BadParameter.__base__

_READ_IMAGES = {
    *(quickstart, features, viz, demo, pack, distill, probe, embed, search, tune, calibrate),
    *(large, read, quantize),
}
_FEATURES: PointOptions = {
    "weights": ("weights", str),
    "size": ("size", str),
    "cores": ("cores", str),
    "keep": ("keep", str),
    "agreement": ("agreement", float),
    "precision": ("precision", str),
}
_POINTS: dict[Any, PointOptions] = {
    features: _FEATURES,
    embed: _FEATURES,
    probe: {
        "weights": ("weights", lambda weights: [weights]),
        **{name: (name, str) for name in ("size", "cores", "keep")},
        "agreement": ("agreement", float),
        "precision": ("precision", str),
    },
    export: {"weights": ("weights", str), "cores": ("cores", str), "keep": ("keep", str)},
    bench: {
        "weights": ("model", str),
        "size": ("sizes", str),
        "cores": ("cores", str),
        "keep": ("keep", str),
        "precision": ("precision", str),
    },
}
"""What a point stands for in each command: its fields as the parameters are written."""
_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look": (quickstart, viz, demo),
    "Use": (features, embed, search, large, read, quantize, export, cache),
    "Train": (pack, recipes, distill, publish, import_),
    "Measure": (info, bench, tune, calibrate, datasets, probe, report),
}
"""As the README has them."""
for group, commands in _GROUPS.items():
    for command in commands:
        run = takes_max_pixels(command) if command in _READ_IMAGES else command
        run = takes_point(run, _POINTS[command]) if command in _POINTS else run
        name = command.__name__.rstrip("_")
        app.command(name=name, cls=_Command, rich_help_panel=group)(run)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from veca import __version__

        try:
            torch = version("torch")  # as installed; importing it would take a second
        except PackageNotFoundError:
            torch = "not installed"
        typer.echo(f"veca {__version__}, torch {torch}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the versions of veca and of torch, and exit.",
        ),
    ] = False,
) -> None:
    pass  # what the group itself takes; the commands do the work


def main(args: list[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    args = sys.argv[1:] if args is None else args
    shown = warnings.showwarning
    warnings.showwarning = _one_line(shown)
    try:
        result = app(args or ["--help"], prog_name="veca", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped.", 130)
    except _UsageError as error:
        return _fail(error.format_message(), 2)
    except VecaError as error:
        return _fail(str(error), 2)
    finally:
        warnings.showwarning = shown
    return result if isinstance(result, int) else 0


def _one_line(show: Callable[..., None]) -> Callable[..., None]:
    """What shows our warnings as they are meant to be read, and all others as `show` does."""

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, VecaWarning):
            print(f"veca: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            show(message, category, *where, **more)

    return shown


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"veca: {line}", file=sys.stderr)
    return code


def entry() -> None:
    """What the installed `veca` script calls."""
    sys.exit(main())
