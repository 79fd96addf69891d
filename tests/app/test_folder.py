"""Temporary folders: of this page, and those of killed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from veca.app.folder import PREFIX, sweep, temporary_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_at_the_end_and_not_swept_before(temporary):
    with temporary_folder() as folder, temporary_folder() as other:
        (folder / "x").write_text("x")
        assert folder != other and folder.name.startswith(PREFIX)
        assert sweep() == [] and (folder / "x").exists()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_page_is_swept_at_the_next_start(temporary):
    program = (
        "import sys, tempfile, time\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "from veca.app.folder import temporary_folder\n"
        "with temporary_folder() as folder:\n"
        "    (folder / 'photo').write_text('x')\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        folder = Path(process.stdout.readline().decode().strip())
        assert sweep() == [] and (folder / "photo").exists()  # it lives
        process.send_signal(signal.SIGKILL)
    assert folder.exists()
    with temporary_folder():
        assert not folder.exists()


def test_nothing_else_is_swept(temporary, monkeypatch):
    private = temporary / "private"
    private.mkdir()
    (private / "diary").write_text("x")
    (temporary / f"{PREFIX}link").symlink_to(private)
    (temporary / f"{PREFIX}file").write_text("x")
    (temporary / "veca-demo-old").mkdir()  # of 0.1, whose folders are not locked
    inside = temporary / f"{PREFIX}dead"
    inside.mkdir()
    (inside / "link").symlink_to(private)
    others = temporary / f"{PREFIX}others"
    assert sweep() == [inside]
    assert (private / "diary").exists() and (temporary / "veca-demo-old").exists()
    others.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert sweep() == [] and others.exists()
