"""The front door: quick to open, and every name behind it is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import veca

HEAVY = ("torch", "numpy", "PIL", "safetensors", "transformers")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_answers_without_heavy_imports(option: str) -> None:
    code = (
        "import sys; from veca.cli.main import main; code = main([sys.argv[1]]); "
        f"sys.exit(code or str([m for m in {HEAVY!r} if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True)
    assert done.stderr.strip() == "" and "veca" in done.stdout


@pytest.mark.slow
def test_a_model_needs_no_more_than_its_own_libraries() -> None:
    """`import veca` and its first use take little time beside `import torch`.

    Pillow takes defusedxml where it finds it.
    """
    code = (
        "import sys, torch; before = set(sys.modules); import veca; assert 'veca.model' not in "
        "sys.modules; veca.load, veca.preprocess; "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    libraries = set(done.stdout.split()) - sys.stdlib_module_names
    assert {"veca", "PIL"} <= libraries <= {"veca", "PIL", "defusedxml", "safetensors"}


def test_every_public_name_is_there() -> None:
    assert set(veca.__all__) <= set(dir(veca))
    for name in veca.__all__:
        assert getattr(veca, name) is not None


@pytest.mark.parametrize("name", ["images", "weights", "model", "embed", "probe", "collections"])
@pytest.mark.slow
def test_modules_are_there_without_another_import(name: str) -> None:
    code = f"import veca; print(veca.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"veca.{name}\n", done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="lode"):
        veca.lode  # noqa: B018


@pytest.mark.slow
def test_a_function_and_its_module_share_a_name() -> None:
    code = "import veca.cost, veca; print(veca.cost('tiny', size=64).grid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(4, 4)\n"


def test_modules_that_pages_name_are_offered_by_completion() -> None:
    assert {"large", "weights", "embed", "probe", "load"} <= set(dir(veca))
