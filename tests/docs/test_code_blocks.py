"""Every code block of the documents runs, from the top of its page to the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import pages

RUN = [
    page
    for page in pages.pages()
    if any(b.language in pages.RUNNABLE and not b.not_run for b in pages.blocks(page))
]
# A first word that tells a command, after settings such as OMP_NUM_THREADS=1.
_COMMAND = re.compile(r"^\s*(\$ )?(\w+=\S* )*(veca|python3?|pip|make|torchrun)\b")


def _name(page: Path) -> str:
    return page.relative_to(pages.ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=_name)
def test_page_runs(page, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(pages.ROOT / "src"), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, pages.__file__, str(page), "--folder", str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode == pages.SKIPPED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_stand_in_blocks_that_run():
    stray = [
        block.place
        for page in pages.pages()
        for block in pages.blocks(page)
        if block.language not in pages.RUNNABLE and not block.not_run
        if any(_COMMAND.match(line) for line in block.code.splitlines())
    ]
    assert not stray, "mark these as bash, or say why they are not run"


def test_python_is_marked_as_python():
    stray = [
        block.place
        for page in pages.pages()
        for block in pages.blocks(page)
        if block.language in ("py", "python3", "sh", "shell", "console", "pycon")
    ]
    assert not stray, "use python or bash, which are run"


def test_hardly_anything_is_left_out():
    found = [block for page in pages.pages() for block in pages.blocks(page)]
    runnable = [block for block in found if block.language in pages.RUNNABLE]
    left_out = [block for block in runnable if block.not_run]
    assert all(len(block.not_run) > 10 for block in left_out)
    assert len(left_out) <= 0.2 * len(runnable), [f"{b.place}: {b.not_run}" for b in left_out]


PAGE = """# A page

```python
x = 2
```

```bash
veca --help
```

<!-- not run: needs a GPU -->
```python
raise RuntimeError
```

```python
print("x is", x + 1, "or so")
```

```text
x is ... so
```
"""


def _run(tmp_path, text: str) -> subprocess.CompletedProcess:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text)
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(pages.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, pages.__file__, str(page), "--folder", str(folder)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_good_page_passes(tmp_path):
    done = _run(tmp_path, PAGE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[1] for line in done.stdout.splitlines()] == ["4", "8", "17"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("x = 2", "x = 2\nundefined"), "line 5"),
        (("veca --help", "veca nonsense"), "page.md:8"),
        (("x is ... so", "x is 4"), "page.md:21: this is not what came out"),
        (("veca --help", "pip install 'veca[nonsense]'"), "does not have"),
        (("veca --help", "pip install numpy"), "only install this package"),
        (("veca --help", "false\ntrue"), "failed"),
    ],
)
def test_a_bad_page_fails(tmp_path, change, says):
    done = _run(tmp_path, PAGE.replace(*change))
    assert done.returncode == 1
    assert says in done.stdout


def test_a_missing_extra_is_told_apart(monkeypatch, capsys):
    extras = {"some": ["no-such-package>=1"], "all": ["veca[some]"], "core": ["numpy"]}
    monkeypatch.setattr(pages, "optional_dependencies", lambda: extras)
    assert pages.pip(["install", "veca[all]"]) == pages.SKIPPED
    assert "no-such-package" in capsys.readouterr().out
    assert pages.pip(["install", "."]) == pages.pip(["install", ".[core]"]) == 0
