"""`veca probe`: what a frozen backbone knows, at every budget."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veca.cli.common import Device, Threads, console, parse_numbers, pick_device, writable_folder
from veca.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import torch

    from veca.probe import Backbone, Run


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
    projection: Annotated[
        bool | None,
        typer.Option(
            "--projection/--no-projection",
            help="Features after the output projection, as the model gives them, or before it.",
            show_default="protocol's",
        ),
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
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep features for the next run.")
    ] = True,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images in a batch.", show_default="protocol's")
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
    from veca.probe import load_protocol, planned_subject, run_probe
    from veca.probe.record import check_out

    tasks = list(dict.fromkeys(part.strip() for part in task.split(",")))
    options = _dataset_options(option or [])
    if check:
        _check(tasks, dataset, data, options)
        return
    changes = list(set_ or [])
    if projection is not None:
        changes.append(f"extract.projection={str(projection).lower()}")
    chosen = load_protocol(protocol).with_settings(changes)
    if batch_size is not None:
        chosen = chosen.with_batch(batch_size)
    for one in tasks:
        chosen.task(one)
    sizes = parse_numbers(size, "--size") if size else None
    place = pick_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    backbones = _backbones(
        weights or [],
        teacher,
        baseline or [],
        cores,
        place,
        getattr(torch, chosen.extract.dtype),
        allow_remote_code,
    )
    used = {
        "data": data, "dataset": dataset, "option": option, "weights": weights, "teacher": teacher,
        "baseline": baseline, "cores": cores, "protocol": protocol, "size": size, "set": changes,
        "train-dataset": train_dataset, "train-data": train_data,
        "train-split": train_split if train_split != "train" else None, "test-split": test_split,
        "batch-size": batch_size, "threads": threads, "verify": verify or None,
        "no-time": not time or None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folders = {}
        for one in tasks:
            planned = planned_subject(one, backbones, dataset=dataset, protocol=chosen, sizes=sizes)
            name = f"{one}-{planned['dataset']}"
            base = out or Path("runs", "probe")
            folders[one] = stack.enter_context(
                writable_folder(base if out and len(tasks) == 1 else base / name)
            )
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
                    cache=(cache or "default") if keep else None,
                    device=place,
                    workers=workers,
                    measure_time=time,
                    verify=verify,
                    command=_command(one, used),
                    progress=lambda text, done, total: update(done, total, text),
                )
            _show(run, folder)


def _dataset_options(lines: list[str]) -> dict[str, Any]:
    """["partition=2"] -> {"partition": 2}; values as in TOML."""
    from veca.probe.protocol import toml_value

    found = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals:
            raise InputError(f"--option reads NAME=VALUE, such as partition=2; got {line!r}.")
        found[name.strip()] = toml_value(value.strip(), line)
    return found


def _check(tasks: list[str], dataset: str, data: Path, options: dict[str, Any]) -> None:
    """Read every image and label of a dataset; exit with 1 if something is wrong with it."""
    from veca.errors import suggest
    from veca.probe.data import DATASET_TASK
    from veca.probe.datasets import check_dataset

    for one in tasks:
        if one not in DATASET_TASK:
            raise InputError(f"unknown task {suggest(one, DATASET_TASK)}")
    sound = True
    for kind in dict.fromkeys(DATASET_TASK[one] for one in tasks):
        found = check_dataset(dataset, data, task=kind, contents=True, **options)
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)
        sound = sound and found.ok
    if not sound:
        raise typer.Exit(1)


def _show(run: Run, folder: Path) -> None:
    """Print the table and write all that a run leaves behind."""
    from veca.probe.plot import best_text, plot
    from veca.probe.table import rich_table, verified, write_tables

    console.print(rich_table(run))
    roles = {row.role for row in run.rows}
    if "student" in roles and "teacher" not in roles:
        console.print("no teacher beside it; --teacher NAME tells how much of one is kept.")
    for line in [*run.notes, *verified(run)]:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    written = write_tables(run, folder)
    try:
        written.append(plot(folder / "plot.png", [run]))
    except MissingExtraError as error:
        console.print(f"no plot: {error}", markup=False, soft_wrap=True)
    console.print(best_text(run), markup=False, highlight=False, soft_wrap=True)
    names = ", ".join(path.name for path in written)
    console.print(f"wrote {names} -> {folder}", markup=False, soft_wrap=True)


def _backbones(
    weights: list[str],
    teacher: str | None,
    baselines: list[str],
    cores: str | None,
    device: torch.device,
    dtype: torch.dtype,
    allow_remote_code: bool,
) -> list[Backbone]:
    from veca.probe import BlindBackbone, DenseBackbone, TeacherBackbone, VecaBackbone
    from veca.probe.backbone import BASELINE, TEACHER
    from veca.probe.blind import NAME as BLIND
    from veca.teachers import load_teacher, read_dense_vit
    from veca.teachers.ours import is_dense_vit
    from veca.weights import load
    from veca.weights.names import public_name

    if not weights and not teacher and not baselines:
        raise InputError("nothing to probe; give --weights, --teacher or --baseline.")
    if cores and not weights:
        raise InputError("--cores are budgets of VECA weights; give --weights.")
    found: list[Backbone] = []
    for spec, role in [(teacher, TEACHER), *((one, BASELINE) for one in baselines)]:
        if spec == BLIND and role == BASELINE:
            found.append(BlindBackbone(device=device))
        elif spec is not None:
            network = load_teacher(
                spec, device=device, dtype=dtype, allow_remote_code=allow_remote_code
            )
            found.append(TeacherBackbone(network, name=public_name(network.name), role=role))
    for source in weights:
        name, path = _named(source)
        if is_dense_vit(Path(path).expanduser()):
            control, _ = read_dense_vit(path)
            found.append(DenseBackbone(control.to(device, dtype), name=name))
            continue
        model = load(path, device=device, dtype=dtype)
        budgets = parse_budgets(cores) if cores else default_budgets(model.config.num_cores)
        found += VecaBackbone(model, name=name).at(budgets)
    return found


def _named(source: str) -> tuple[str, str]:
    """ "NAME=PATH" -> (NAME, PATH); otherwise the last part of the path is the name."""
    name, equals, path = source.partition("=")
    if equals and "/" not in name and not Path(source).exists():
        return name, path
    last = Path(source).name if Path(source).expanduser().exists() else source
    return last.removesuffix(".safetensors"), source


def parse_budgets(text: str) -> list[int]:
    """'8,16,64' -> [8, 16, 64]; '8,16,...,64' counts on in equal steps."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not any(set(part) <= {".", "…"} for part in parts):
        return list(dict.fromkeys(parse_numbers(text, "--cores")))
    at = next(i for i, part in enumerate(parts) if set(part) <= {".", "…"})
    numbers = parse_numbers(",".join(parts[:at] + parts[at + 1 :]), "--cores")
    if at < 2 or at != len(parts) - 2:
        raise InputError(f"--cores with '...' reads FIRST,SECOND,...,LAST; got {text!r}.")
    step, last = numbers[at - 1] - numbers[at - 2], numbers[-1]
    if step < 1 or (last - numbers[at - 1]) % step:
        raise InputError(f"--cores {text!r}: {last} is not reached in equal steps.")
    return [*numbers[: at - 1], *range(numbers[at - 1], last + 1, step)]


def default_budgets(bank: int) -> list[int]:
    """8, 16, ... and the whole bank."""
    return sorted({*range(8, bank + 1, 8), bank})


def _command(task: str, options: dict[str, Any]) -> str:
    """The command to repeat a run; paths are shortened to their last part, to be published."""
    from veca.weights.names import public_name

    words = ["veca", "probe", task]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                words.append(f"--{name}")
            elif one is not None:
                text = Path(one).name if isinstance(one, Path) else public_name(str(one))
                words += [f"--{name}", text]
    return shlex.join(words)
