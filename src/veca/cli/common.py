"""What several commands share: the console, option types, and how their values are read."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from veca._util.numbers import parse_numbers as parse_numbers
from veca.errors import InputError, OutputError

if TYPE_CHECKING:
    import torch

console = Console()

Weights = Annotated[str, typer.Option(help="A name, a folder, a .safetensors file or a hub id.")]
Cores = Annotated[int | None, typer.Option(help="The budget.", show_default="all the model has")]
ShownSize = Annotated[str, typer.Option(help="Short side in pixels, HEIGHTxWIDTH, or native.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto: the best there is.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads to use.", show_default="torch's choice")
]


def pick_device(name: str) -> torch.device:
    """The torch device a user asked for, checked to exist."""
    import torch

    from veca._util.device import usable_device

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    return usable_device(name)


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """'512' -> 512 (short side), '384x512' -> (384, 512) (height x width), 'native' -> None."""
    if text is None or text == "native":
        return None
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) == 1:
        return sides[0]
    if len(sides) == 2:
        return sides[0], sides[1]
    raise InputError(
        f"a size is a number (the short side, in pixels), HEIGHTxWIDTH or 'native'; got {text!r}."
    )


def count(number: int, what: str) -> str:
    """'1 image', '2,000 images'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def say_passed_over(counts: Mapping[str, int]) -> None:
    """One line about the files of folders that are no images by their suffix, if there are any."""
    from veca._util.files import printable

    if not counts:
        return
    kinds = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    shown = [f"{number:,} {printable(name) or 'without a suffix'}" for name, number in kinds[:5]]
    rest = sum(number for _, number in kinds[5:])
    shown += [f"{rest:,} others"] if rest else []
    total = sum(counts.values())
    said = f"passed over {count(total, 'file')} of kinds that are not read: "
    console.print(said + ", ".join(shown), markup=False, highlight=False, soft_wrap=True)


def command_line(context: typer.Context) -> str:
    """The command that is running, as it may be typed again: what was given, defaults left out."""
    words = context.command_path.split()
    options: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params.get(name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if parameter.param_type_name == "argument":
                words.append(str(one))
            elif isinstance(one, bool):
                options.append(parameter.opts[0] if one else parameter.secondary_opts[0])
            else:
                options += [parameter.opts[0], str(one)]
    return shlex.join([*words, *options])


@contextlib.contextmanager
def writable_folder(path: Path) -> Iterator[Path]:
    """Create the folder if need be, and make sure that files can be written there.

    If the block writes nothing, because it fails, the folder goes again.
    """
    from veca._util.files import folder_to_fill

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_to_fill(path))
            probe = path / ".veca-write-test"
            probe.touch()
            probe.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(
                f"cannot write to the folder {path} ({reason}); choose another with --out."
            ) from error
        yield path
