"""`veca probe`: what a frozen backbone knows, at every budget."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veca.cli.common import (
    Agreement,
    Device,
    ProbeWidth,
    Threads,
    console,
    parse_keeps,
    parse_numbers,
    pick_device,
    renamed,
    writable_folder,
)
from veca.errors import MissingExtraError, check_choice

if TYPE_CHECKING:
    from veca.probe import Run


def probe(
    task: Annotated[
        str,
        typer.Argument(help="knn, linear, logreg, segmentation or depth; or several: knn,linear."),
    ],
    data: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    dataset: Annotated[
        str, typer.Option(help="Its name: oxford-pets, imagenet-1k, ade20k-150, nyuv2, folder, ...")
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="VECA weights (a name, path or hub id) or the path of a dense control; or "
            "NAME=PATH. Can be repeated."
        ),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The teacher that retention is measured against.")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Other backbones, named like teachers, or blind, which sees no image; repeatable."
        ),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(help="Budgets, such as 8,16,...,64.", show_default="8,16,... and all"),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Shares of patch tokens that go on after merging, such as 0.35,0.5,1.",
            show_default="1: all",
        ),
    ] = None,
    agreement: Agreement = None,
    protocol: Annotated[
        str, typer.Option(help="A name (quick, dinov3-ade20k, ...) or a .toml file.")
    ] = "quick",
    size: Annotated[
        str | None, typer.Option(help="Pixels, such as 224 or 224,448.", show_default="protocol's")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a constant: knn.k=[5,10]. Can be repeated."),
    ] = None,
    width: ProbeWidth = None,
    projection: Annotated[
        bool | None, typer.Option("--projection/--no-projection", hidden=True)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results; with several tasks, one in it for each.",
            show_default="runs/probe/TASK-DATASET",
        ),
    ] = None,
    train_dataset: Annotated[
        str | None, typer.Option(help="Learn from another dataset (for imagenet-v2, -real).")
    ] = None,
    train_data: Annotated[Path | None, typer.Option(help="Folder of that dataset.")] = None,
    train_split: Annotated[str, typer.Option(help="Split to learn from.")] = "train",
    test_split: Annotated[
        str | None, typer.Option(help="Split to score.", show_default="as published")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Of the dataset: allow_empty_classes=true, partition=2. Repeatable."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only read the data: what is missing, where to get it."),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps features.", show_default="~/.cache/veca/probe"),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Keep no features for the next run.")
    ] = False,
    no_keep: Annotated[bool, typer.Option("--no-keep", hidden=True)] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images in a batch.", show_default="protocol's")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="What backbones compute in: fp32, bf16, fp16; int8: VECA weights on a CPU. Of "
            "several, such as fp32,int8, VECA weights are compared with the first.",
            show_default="protocol's",
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that read images.", show_default="one a CPU")
    ] = None,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Measure milliseconds.")] = True,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with scikit-learn; takes longer.")
    ] = False,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="For teachers that need it (RADIO).")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results of another run in OUT.")
    ] = False,
) -> None:
    """Probe frozen backbones: k-NN, linear, logistic regression, segmentation or depth.

    veca probe knn --data pets/ --dataset oxford-pets --weights small --teacher dinov3-vitb16
    """
    import torch

    from veca._util.progress import progress_bar
    from veca.precision import protocol_name
    from veca.probe import (
        check_out,
        load_backbones,
        load_protocol,
        parse_budgets,
        parse_options,
        parse_precisions,
        planned_subject,
        repeat_command,
        run_folder,
        run_probe,
    )

    tasks = list(dict.fromkeys(part.strip() for part in task.split(",")))
    options = parse_options(option or [])
    if check:
        _check(tasks, dataset, data, options)
        return
    changes = list(set_ or [])
    if projection is not None:
        width = "projected" if projection else "native"
        renamed("--projection" if projection else "--no-projection", f"--width {width}")
    if no_keep:
        renamed("--no-keep", "--no-cache")
    if width is not None:
        check_choice("width of features", width, ("native", "projected"))
        changes.append(f"extract.projection={str(width == 'projected').lower()}")
    names = parse_precisions(precision) if precision is not None else []
    if names:
        changes.append(f"extract.dtype={protocol_name(names[0])}")
    chosen = load_protocol(protocol).with_settings(changes)
    if batch_size is not None:
        chosen = chosen.with_batch(batch_size)
    for one in tasks:
        chosen.task(one)
    sizes = parse_numbers(size, "--size") if size else None
    place = pick_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    backbones = load_backbones(
        weights or [],
        teacher=teacher,
        baselines=baseline or [],
        budgets=parse_budgets(cores) if cores else None,
        keep=parse_keeps(keep) if keep else None,
        agreement=agreement,
        device=place,
        dtype=getattr(torch, chosen.extract.dtype, torch.float32),
        precision=names if len(names) > 1 else chosen.extract.dtype,
        allow_remote_code=allow_remote_code,
    )
    used = {
        "data": data, "dataset": dataset, "option": option, "weights": weights, "teacher": teacher,
        "baseline": baseline, "cores": cores, "keep": keep, "agreement": agreement,
        "protocol": protocol, "size": size, "set": changes,
        "train-dataset": train_dataset, "train-data": train_data,
        "train-split": train_split if train_split != "train" else None, "test-split": test_split,
        "precision": ",".join(names) if len(names) > 1 else None,
        "batch-size": batch_size, "threads": threads, "verify": verify or None,
        "no-time": not time or None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folders = {}
        for one in tasks:
            planned = planned_subject(one, backbones, dataset=dataset, protocol=chosen, sizes=sizes)
            folder = run_folder(one, planned["dataset"], out, several=len(tasks) > 1)
            folders[one] = stack.enter_context(writable_folder(folder))
            check_out(folders[one], planned, overwrite)
        for one, folder in folders.items():
            with progress_bar("preparing", console) as update:
                run = run_probe(
                    one,
                    backbones,
                    dataset=dataset,
                    data=data,
                    protocol=chosen,
                    sizes=sizes,
                    train_dataset=train_dataset,
                    train_data=train_data,
                    train_split=train_split,
                    test_split=test_split,
                    options=options,
                    cache=None if no_cache or no_keep else cache or "default",
                    device=place,
                    workers=workers,
                    measure_time=time,
                    verify=verify,
                    command=repeat_command(one, used),
                    progress=lambda text, done, total: update(done, total, text),
                )
            _show(run, folder)


def _check(tasks: list[str], dataset: str, data: Path, options: dict[str, Any]) -> None:
    """Print what is wrong with a dataset; exit with 1 if anything is."""
    from veca.probe import check_data

    sound = True
    for found in check_data(tasks, dataset, data, options):
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
        sound = sound and found.ok
    if not sound:
        raise typer.Exit(1)


def _show(run: Run, folder: Path) -> None:
    """Print the table and write all that a run leaves behind."""
    from veca._util.files import check_written
    from veca.probe.plot import best_text, plot
    from veca.probe.record import RESULTS
    from veca.probe.table import rich_table, verified, write_tables

    console.print(rich_table(run))
    roles = {row.role for row in run.rows}
    if "student" in roles and "teacher" not in roles:
        console.print("no teacher beside it; --teacher NAME adds the retention of its score.")
    for line in [*run.notes, *verified(run)]:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    written = write_tables(run, folder)
    try:
        written.append(plot(folder / "plot.png", [run]))
    except MissingExtraError as error:
        console.print(f"no plot: {error}", markup=False, soft_wrap=True)
    console.print(best_text(run), markup=False, highlight=False, soft_wrap=True)
    check_written([folder / RESULTS, *written])
    names = ", ".join(path.name for path in written)
    console.print(f"wrote {names} -> {folder}", markup=False, soft_wrap=True)
