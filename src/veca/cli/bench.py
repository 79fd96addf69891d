"""`veca bench`: time and memory on this machine, against resolution and budget, beside dense."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from veca.cli.common import (
    Device,
    Threads,
    console,
    parse_keeps,
    parse_numbers,
    pick_device,
    renamed,
    writable_folder,
)
from veca.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

    from veca.bench import BenchRow


def bench(
    model: Annotated[
        str,
        typer.Argument(help="A preset (tiny, small, ...: fresh weights) or saved weights."),
    ] = "small",
    sizes: Annotated[
        str, typer.Option(help="Sides of the square images, in pixels.")
    ] = "256,512,1024,2048",
    cores: Annotated[
        str | None, typer.Option(help="Budgets, such as 8,64.", show_default="8 and all")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Shares of patch tokens that go on after merging, such as 0.5,1.",
            show_default="1: all",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 1,
    device: Device = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="fp32, bf16, fp16, int8 (CPU); several side by side, each beside dense attention "
            "in the same."
        ),
    ] = "fp32",
    engine: Annotated[
        str,
        typer.Option(
            help="torch, onnxruntime (CPU: fp32, int8), openvino; several side by side. OpenVINO "
            "joins onnxruntime where it is installed."
        ),
    ] = "torch",
    dtype: Annotated[str | None, typer.Option(hidden=True)] = None,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds at each size, at least.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time spent on the rounds of a size, at least.")
    ] = 1.0,
    limit: Annotated[
        float, typer.Option(min=0, help="No new round after this many seconds at one size.")
    ] = 120.0,
    dense: Annotated[
        bool, typer.Option(help="Measure the same network with full attention, too.")
    ] = True,
    graph: Annotated[
        bool, typer.Option("--graph", help="CUDA: time the replay of a captured graph.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for bench.csv and bench.png.")] = Path("bench"),
) -> None:
    """Time and memory on this machine, against resolution and budget, beside dense attention.

    The networks take turns, so that a slow moment of the machine hits all of them.

    veca bench small --sizes 256,512,1024 --cores 8,64 --threads 1
    """
    from veca import bench as library

    if dtype is not None:
        precision = dtype
        renamed("--dtype", "--precision")
    precisions = tuple(part.strip() for part in precision.split(",") if part.strip())
    plan = library.BenchPlan(
        sizes=tuple(parse_numbers(sizes, "--sizes")),
        batch=batch,
        device=str(pick_device(device)),
        precisions=precisions or (precision,),
        engines=tuple(part.strip() for part in engine.split(",") if part.strip()),
        threads=threads,
        repeats=repeats,
        seconds=seconds,
        limit=limit,
        graph=graph,
    )
    name, network = library.find_model(model)
    budgets = library.check(
        network.config, plan, parse_numbers(cores, "--cores") if cores else None
    )
    shares = library.check_shares(parse_keeps(keep) if keep is not None else [1.0])
    where = library.machine(plan.device)
    rows: list[BenchRow] = []

    def keep_rows(new: list[BenchRow]) -> None:
        rows.extend(new)
        # After each size, so that what is stopped half way leaves its first half.
        library.write_csv(out / "bench.csv", rows, where)

    # Once all is well, and before the work.
    with console.status("preparing") as status, writable_folder(out):
        library.bench(
            network,
            plan,
            cores=budgets,
            keep=shares,
            dense=dense,
            name=name,
            progress=status.update,
            on_rows=keep_rows,
        )

    console.print(_table(rows))
    for line in _findings(rows):
        console.print(line, markup=False, highlight=False)
    written = [out / "bench.csv"]
    try:
        library.plot(out / "bench.png", rows, where)
        written.append(out / "bench.png")
    except MissingExtraError as error:
        console.print(f"no plot: {error}", markup=False, soft_wrap=True)
    console.print(f"wrote {' and '.join(map(str, written))}", markup=False, soft_wrap=True)


def _table(rows: list[BenchRow]) -> Table:
    from rich.table import Table

    from veca import bench as library

    first = rows[0]
    title = f"{first.network}, batch {first.batch}, {first.device}, {library.precisions(rows)}"
    if first.device == "cpu":
        title += f", {first.threads} thread{'s' * (first.threads != 1)}"
    note = "peak MiB: tensors alive at once in one run, weights and input apart"
    table = Table(title=title, caption=note)
    table.add_column("size", justify="right")
    table.add_column("model")
    for name in ("ms", "spread", "images/s", "peak MiB", "against dense"):
        table.add_column(name, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        numbers = [row.error, "", "", "", ""]
        if not row.error:
            numbers = [
                _number(row.ms),
                _number(row.spread_ms),
                _number(row.images_per_s),
                _number(row.peak_mib),
                _times(row.speedup),
            ]
        last_of_size = after is not None and after.size != row.size
        table.add_row(str(row.size), row.label, *numbers, end_section=last_of_size)
    return table


def _findings(rows: list[BenchRow]) -> list[str]:
    """How time and memory grow, and who is faster, in words."""
    from veca import bench as library

    lines = []
    sizes = library.scaling_sizes(rows)
    for label, group in library.by_contender(rows).items():
        time = library.scaling_exponent(group, sizes)
        memory = library.scaling_exponent(group, sizes, of="peak_mib")
        if not math.isnan(time):
            lines.append(
                f"{label}: from {sizes[0]} to {sizes[-1]} px time grows as N^{time:.2f}"
                + ("" if math.isnan(memory) else f" and memory as N^{memory:.2f}")
            )
    for label, group in library.by_contender(rows).items():
        faster = [f"{_times(row.speedup)} at {row.size} px" for row in group if row.speedup > 0]
        if faster and group[0].model != library.DENSE:
            lines.append(f"{label} against dense: {', '.join(faster)}")
    return lines


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _times(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}x"
