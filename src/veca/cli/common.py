"""What several commands share: the console, option types, and how their values are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from veca._util.numbers import parse_numbers as parse_numbers
from veca.config import DEFAULT_SIZE
from veca.errors import InputError, OutputError

if TYPE_CHECKING:
    import torch

console = Console()

Weights = Annotated[str, typer.Option(help="A name, a folder, a .safetensors file or a hub id.")]
Cores = Annotated[int | None, typer.Option(help="The budget.", show_default="all the model has")]
_SIZE = "Short side in pixels, HEIGHTxWIDTH, or native."
ShownSize = Annotated[str, typer.Option(help=_SIZE)]
StoredSize = Annotated[
    str | None, typer.Option(help=_SIZE, show_default=f"{DEFAULT_SIZE}, or that of OUT")
]
"""Of what goes into a folder, which may have a size already."""
Images = Annotated[
    list[str],
    typer.Argument(
        help="Image files, folders (with subfolders), .txt lists, .tar shards and patterns."
    ),
]
What = Annotated[str, typer.Option(help="cls (the global embedding), patches, or both.")]
_WIDTH = (
    "native: features before the output projection, as wide as the network. projected: after it, "
    "as wide as the teacher."
)
Width = Annotated[
    str | None,
    typer.Option(
        help=f"{_WIDTH} mixed: cls projected, patches native.",
        show_default="projected, or that of OUT",
    ),
]
ProbeWidth = Annotated[str | None, typer.Option(help=_WIDTH, show_default="protocol's")]
Pca = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Reduce features to so many numbers, by PCA of the first images.",
        show_default="none, or that of OUT",
    ),
]
Dtype = Annotated[str, typer.Option(help="Of the written features: float16, float32.")]
Precision = Annotated[
    str, typer.Option(help="What the model computes in: float32, bfloat16, float16.")
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Images of one size that are computed together, at most.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start over: remove what earlier runs wrote to OUT.")
]
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


def parse_stored_size(text: str | None) -> int | tuple[int, int] | Literal["auto"] | None:
    """As `parse_size`; what was not given is "auto"."""
    return "auto" if text is None else parse_size(text)


def parse_what(text: str) -> list[str]:
    """'cls,patches' -> ["cls", "patches"]."""
    return [part.strip() for part in text.split(",") if part.strip()]


def renamed(old: str, new: str) -> None:
    """Say that an option of 0.1 has another name now."""
    typer.echo(f"veca: {old} is now called {new}", err=True)


def say_estimate(estimate: object) -> None:
    """What a run will take, in a line of its own before it starts."""
    console.print(str(estimate), markup=False, highlight=False, soft_wrap=True)


def count(number: int, what: str, several: str | None = None) -> str:
    """'1 image', '2,000 images', '2 entries'."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with long texts: as it is, or with all but the first column below each other.

    The second form is for terminals in which the columns would be a word wide.
    """
    wide = console.width >= 130
    table = Table(show_lines=True)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:] if wide else ["about it"]:
        table.add_column(name, overflow="fold")
    for first, *rest in ([escape(text) for text in row] for row in rows):
        named = zip(columns[1:], rest, strict=True)
        lines = [f"{name}:\n{text}" if "\n" in text else f"{name}: {text}" for name, text in named]
        table.add_row(first, *(rest if wide else ["\n".join(lines)]))
    console.print(table, markup=False, highlight=False)


def say(line: str) -> None:
    """A line as it is: nothing coloured, nothing taken for markup, not wrapped."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


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
