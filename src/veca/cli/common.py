"""What several commands share: the console, option types, and how their values are read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from veca._util.numbers import count as count
from veca._util.numbers import parse_numbers as parse_numbers
from veca.config import DEFAULT_SIZE
from veca.errors import InputError, OutputError, WeightsError

if TYPE_CHECKING:
    import torch

    from veca.data import ImageSource
    from veca.model import Veca

console = Console()

Weights = Annotated[str, typer.Option(help="A name, a folder, a .safetensors file or a hub id.")]
AutoCores = Annotated[
    str | None,
    typer.Option(
        help="The budget; or auto: what --agreement takes at this size.",
        show_default="all the model has",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="The share of patch tokens that go on after merging, 0.2 to 1; or auto.",
        show_default="1: all",
    ),
]
Agreement = Annotated[
    float | None,
    typer.Option(
        help="With auto: the promised cosine with the full pass, such as 0.98.",
        show_default="the model's",
    ),
]
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
    str, typer.Option(help="What the model computes in: fp32, bf16, fp16 (GPU), int8 (CPU).")
]
AutoPrecision = Annotated[
    str,
    typer.Option(
        help="What the model computes in: fp32, bf16, fp16 (GPU), int8 (CPU), or auto: on a CPU "
        "the fastest that agrees with fp32."
    ),
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

_MAX_PIXELS_VARIABLE = "VECA_MAX_PIXELS"  # as in veca.images.read, which imports torch
MaxPixels = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Refuse images of more pixels, before they are decoded. Raise it for large images "
        "that you trust.",
        show_default=f"${_MAX_PIXELS_VARIABLE}, or 178,956,970",
    ),
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


def parse_cores(text: str | None) -> int | str | None:
    """'32' -> 32; 'auto' as it is; None, which is all, stays."""
    if text is None or text.strip() == "auto":
        return text and text.strip()
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--cores must be a whole number, the budget, or auto; got {text!r}."
        ) from None


def parse_keep(text: str | None) -> float | str | None:
    """'0.5' -> 0.5; 'auto' as it is; None, which is all, stays."""
    if text is None:
        return None
    from veca.checks import read_keep

    return read_keep(text)


def parse_keeps(text: str) -> list[float | str]:
    """'0.35,0.5,1' -> [0.35, 0.5, 1.0]; one of them may be 'auto'."""
    from veca.checks import read_keep

    parts = [part for part in text.split(",") if part.strip()]
    return list(dict.fromkeys(read_keep(part) for part in parts or [text]))


def parse_what(text: str) -> list[str]:
    """'cls,patches' -> ["cls", "patches"]."""
    return [part.strip() for part in text.split(",") if part.strip()]


def renamed(old: str, new: str) -> None:
    """Say that an option of 0.1 has another name now."""
    typer.echo(f"veca: {old} is now called {new}", err=True)


def say_estimate(estimate: object) -> None:
    """What a run will take, in a line of its own before it starts."""
    console.print(str(estimate), markup=False, highlight=False, soft_wrap=True)


def say_hint(model: Veca) -> None:
    """In a line, what another precision would gain where the model computes in float32."""
    from veca.precision import hint

    line = hint(model)
    if line is not None:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def say_passed_over(images: ImageSource) -> None:
    """Say which files of folders are no images by their suffix; loudly, where they are many."""
    rest: Counter[str] = Counter()
    for part in _parts(images):
        others: Mapping[str, int] = getattr(part, "passed_over", {})
        folder = getattr(part, "folder", None)
        rest.update(_say_large_kinds(others, len(part), "" if folder is None else f"{folder}: "))
    _say_small_kinds(rest)


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


def find_photos(sources: Sequence[str]) -> list[Path]:
    """The image files of paths, folders and patterns; says what is passed over."""
    from veca.images import find_images

    others: Counter[str] = Counter()
    found = find_images(sources, passed_over=others)
    _say_small_kinds(_say_large_kinds(others, len(found)))
    return found


def _parts(images: ImageSource) -> Iterator[ImageSource]:
    for part in getattr(images, "sources", ()):
        yield from _parts(part)
    if not hasattr(images, "sources"):
        yield images


def _say_large_kinds(others: Mapping[str, int], images: int, where: str = "") -> dict[str, int]:
    """Say which kinds of files make up much of a folder; the others are returned."""
    from veca._util.files import one_line
    from veca.images.find import large_kinds, left_out

    said = left_out(others, images)
    if said is not None:
        text = one_line(f"warning: {where}{said}")
        console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    large = large_kinds(others, images)
    return {suffix: number for suffix, number in others.items() if suffix not in large}


def _say_small_kinds(others: Mapping[str, int]) -> None:
    from veca._util.files import one_line
    from veca.images.find import kinds

    if others:
        total = count(sum(others.values()), "file")
        said = one_line(f"passed over {total} of kinds that are not read: {kinds(others)}")
        console.print(said, markup=False, highlight=False, soft_wrap=True)


_Command = TypeVar("_Command", bound=Callable[..., Any])


def takes_max_pixels(command: _Command) -> _Command:
    """A command that reads images, with the option --max-pixels, which holds while it runs."""

    @functools.wraps(command)
    def run(*args: Any, max_pixels: int | None = None, **options: Any) -> Any:
        with pixels_at_most(max_pixels):
            return command(*args, **options)

    own = inspect.signature(command, eval_str=True)
    asked = inspect.Parameter(
        "max_pixels", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=MaxPixels
    )
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), asked])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in own.parameters.items()}
    run.__annotations__["max_pixels"] = MaxPixels
    return cast(_Command, run)


Point = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="A point.json of veca tune: what of it is not given here is taken from there.",
    ),
]


PointOptions: TypeAlias = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""By a field of `veca.points.OperatingPoint`, the parameter that it stands for, and how its value
is written there."""


def takes_point(command: _Command, options: PointOptions) -> _Command:
    """A command with the option --point, which stands for options that are not typed."""

    @functools.wraps(command)
    def run(
        *args: Any, point_context: typer.Context, point: Path | None = None, **given: Any
    ) -> Any:
        if "context" in inspect.signature(command).parameters:
            given["context"] = point_context
        if point is not None:
            given |= _from_point(point, point_context, given, options)
        return command(*args, **given)

    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.name != "context"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    asked = [
        inspect.Parameter("point", keyword, default=None, annotation=Point),
        inspect.Parameter("point_context", keyword, annotation=typer.Context),
    ]
    run.__signature__ = own.replace(parameters=[*kept, *asked])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*kept, *asked]}
    return cast(_Command, run)


def _from_point(
    path: Path,
    context: typer.Context,
    given: Mapping[str, Any],
    options: PointOptions,
) -> dict[str, Any]:
    """Values of a point for the options that were not typed; warns where it is of others."""
    from veca.points import machine_name, read_point
    from veca.weights import weights_hash

    point = read_point(path)
    taken = {}
    for field, (name, written) in options.items():
        source = context.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if not typed and getattr(point, field) is not None:
            taken[name] = written(getattr(point, field))
    used = {**given, **taken}[options["weights"][0]]
    machine = point.machine
    if "device" in given and str(given.get("engine", "local")).endswith("local"):
        machine = machine_name(pick_device(given["device"]))
    for one in used if isinstance(used, list) else [used]:
        name = one.partition("=")[2] or one  # a probe's NAME=PATH
        with contextlib.suppress(WeightsError):  # which the command will say itself
            point.warn_of_others(weights=name, sha256=weights_hash(name), machine=machine)
    return taken


@contextlib.contextmanager
def pixels_at_most(limit: int | None) -> Iterator[None]:
    """Another limit to the pixels of an image, in this process and those that it starts."""
    if limit is None:
        yield
        return
    before = os.environ.get(_MAX_PIXELS_VARIABLE)
    os.environ[_MAX_PIXELS_VARIABLE] = str(limit)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MAX_PIXELS_VARIABLE]
        else:
            os.environ[_MAX_PIXELS_VARIABLE] = before


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
