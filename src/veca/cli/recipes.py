"""`veca recipes`: the recipes that `veca distill --config` takes by name."""

from __future__ import annotations

from typing import Annotated

import typer

from veca.cli.common import say, show_table


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe to print, as a file to start from.")
    ] = None,
) -> None:
    """List the recipes for `veca distill`: what each trains, on what, for how long, how well."""
    from veca.distill import list_recipes, load_config
    from veca.distill.recipe import recipe_text

    if name is not None:
        typer.echo(recipe_text(name), nl=False)
        return
    rows = []
    for one in list_recipes():
        teachers = ", ".join(teacher.name for teacher in load_config(one.name).teachers)
        rows.append((one.name, one.about, teachers, one.hardware, one.cost, one.expected))
    show_table(("recipe", "what", "teacher", "hardware", "cost", "expected"), rows)
    say("Run one: veca distill --config NAME --data IMAGES --out FOLDER")
    say("Change one: veca recipes NAME > mine.toml")
