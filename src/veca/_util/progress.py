"""One progress bar for every command: what is done, how far it is, how long it will take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Update(Protocol):
    """Tells a bar how far the work is; another `text` starts another piece of work."""

    def __call__(self, done: int, total: int | None, text: str | None = None) -> None: ...


@contextlib.contextmanager
def progress_bar(text: str, console: Console, *, counts: bool = True) -> Iterator[Update]:
    """A bar that is gone when the work is done; outside a terminal nothing is shown.

    Args:
        counts: show a counter and the time left. Without them the text says it all: it changes
            with every update, and its last state stays.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    line = TextColumn("{task.description}", markup=False)
    counted = (line, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    columns = counted if counts else (line, BarColumn(bar_width=None))
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=counts, disable=hidden) as bar:
        task = bar.add_task(text, total=None)
        current = text

        def update(done: int, total: int | None, text: str | None = None) -> None:
            nonlocal current
            if counts and text is not None and text != current:  # the time is estimated anew
                bar.reset(task, total=total, description=text)
                current = text
            bar.update(task, completed=done, total=total, description=text or current)

        yield update
