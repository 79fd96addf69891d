"""What is remembered of visitors, and who is forgotten first."""

from __future__ import annotations

import pytest
from PIL import Image

from veca.app.content import Photo
from veca.app.uploads import Uploads
from veca.app.visitors import Visit, Visitors
from veca.errors import ImageError, InputError


def _visit(side=10):
    return Visit(Photo("p", Image.new("RGB", (side, side)), (side, side)), "w", 64)


def test_the_longest_unseen_are_forgotten_first():
    visitors = Visitors(total=2 * 1000)  # a photo of 10 x 10 has 300 bytes
    for i in range(6):
        visitors.keep(f"s{i}", f"client {i}", _visit())
    assert visitors.get("s0") is not None  # seen just now
    visitors.keep("new", "another", _visit())
    assert visitors.get("s1") is None and visitors.get("s0") is not None
    assert len(visitors) == 6 and visitors.get("unknown") is None


def test_a_client_with_many_visits_loses_its_own():
    visitors = Visitors(total=2000)
    for i in range(3):
        visitors.keep(f"other {i}", f"client {i}", _visit())
    for i in range(50):
        visitors.keep(f"greedy {i}", "greedy", _visit())
    assert all(visitors.get(f"other {i}") for i in range(3))
    assert visitors.get("greedy 49") and visitors.get("greedy 40") is None


def test_a_photo_larger_than_all_room_is_kept_alone():
    visitors = Visitors(total=100)
    visitors.keep("a", "x", _visit())
    visitors.keep("b", "y", _visit(100))
    assert visitors.get("b") and len(visitors) == 1


@pytest.fixture
def uploads(tmp_path):
    return Uploads(tmp_path / "uploads", total=100)


def _send(uploads, client, content=b"x" * 20, name="a.png", announced=None):
    import io

    with uploads.place(client, announced or len(content)) as path:
        uploads.write(path, name, io.BytesIO(content))
    return path


def test_an_upload_is_taken_once(uploads):
    path = _send(uploads, "a", b"hello", name="../../x/holiday\n.jpg")
    assert path in uploads and "/etc/passwd" not in uploads
    with uploads.take(path) as (file, name):
        assert file.read_bytes() == b"hello" and name == "holiday.jpg"
        assert file.parent == uploads.folder
        with pytest.raises(ImageError), uploads.take(path):
            pass
    assert path not in uploads and not file.exists()
    with pytest.raises(ImageError), uploads.take("/etc/passwd"):
        pass


def test_there_is_a_quota_for_all_and_for_each(uploads):
    for _ in range(2):
        _send(uploads, "greedy")
    with pytest.raises(InputError, match="uploads"):
        _send(uploads, "greedy")  # 60 of 100: over half
    for client in "abc":
        _send(uploads, client)
    with pytest.raises(InputError, match="uploads"):
        _send(uploads, "d")  # 120 of 100
    assert len(list(uploads.folder.iterdir())) == 5


def test_what_is_announced_counts_while_it_arrives_and_what_came_after(uploads):
    with uploads.place("a", 50), pytest.raises(InputError):
        _send(uploads, "a")
    _send(uploads, "a", announced=50)
    _send(uploads, "a", announced=30)  # 20 + 30


def test_failed_and_old_uploads_leave_nothing(uploads, monkeypatch):
    with pytest.raises(ZeroDivisionError), uploads.place("a", 50) as path:
        raise ZeroDivisionError
    assert path not in uploads
    for _ in range(2):
        old = _send(uploads, "a")
    monkeypatch.setattr("veca.app.uploads._PATIENCE", -1.0)
    _send(uploads, "a")
    assert old not in uploads and len(list(uploads.folder.iterdir())) == 1
