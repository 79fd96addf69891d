"""The `veca` command: registers one function a file, and turns errors into one line."""

from __future__ import annotations

import sys

import click
import typer

from veca.cli.bench import bench
from veca.cli.features import features
from veca.cli.import_ import import_
from veca.cli.info import info
from veca.cli.quickstart import quickstart
from veca.errors import VecaError

app = typer.Typer(
    name="veca",
    help="Dense vision features through a few elastic cores, at a cost you can dial.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (quickstart, info, features, bench, import_):
    app.command(name=command.__name__.rstrip("_"))(command)


def main(args: list[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        result = app(args, prog_name="veca", standalone_mode=False)
    except click.exceptions.Abort:
        return _fail("stopped.", 130)
    except click.UsageError as error:
        return _fail(error.format_message(), 2)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except VecaError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("stopped.", 130)
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"veca: {line}", file=sys.stderr)
    return code


def entry() -> None:
    """What the installed `veca` script calls."""
    sys.exit(main())
