"""A few large images at a time, however many read."""

from __future__ import annotations

import io
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from veca._util import room
from veca.data.pool import ordered_map
from veca.embed.pipeline import read_ahead
from veca.images import read, read_image

MIB = 2**20


@pytest.fixture
def small_room(monkeypatch) -> Iterator[room.Room]:
    """Of 1 MiB."""
    monkeypatch.setattr(room, "_UNIT", MIB // 16)
    before, mine = room._room, room.Room(MIB)
    room.use_room(mine)
    yield mine
    room.use_room(before)


@pytest.fixture
def most_at_once(monkeypatch) -> list[int]:
    """Grows to how many images were held at the same time."""
    seen, now, lock, real = [0], [0], threading.Lock(), read._to_rgb

    def counted(image):
        with lock:
            now[0] += 1
            seen[0] = max(seen[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return real(image)

    monkeypatch.setattr(read, "_to_rgb", counted)
    return seen


def encoded(side: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def test_large_images_wait_for_each_other(small_room, most_at_once) -> None:
    data = encoded(250)  # half a megabyte each
    list(read_ahead(lambda _: read_image(data).size, range(8), workers=8, ahead=8))
    assert most_at_once == [2]


def test_one_larger_than_the_room_is_alone(small_room, most_at_once) -> None:
    jobs = [encoded(500), encoded(80), encoded(500), encoded(80)]
    list(read_ahead(lambda data: read_image(data).size, jobs, workers=4, ahead=4))
    assert most_at_once[0] <= 3  # the small ones need no leave
    assert small_room._free.acquire(blocking=False)


def test_small_images_never_wait(small_room, most_at_once) -> None:
    data = encoded(80)
    taken = [small_room.take(MIB)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read_image(data).size, range(8))) == [(80, 80)] * 8
    assert most_at_once[0] > 2 and taken == [small_room.units]


def test_what_was_decoded_counts_until_it_is_smaller(small_room) -> None:
    with room.one_by_one():
        image = read_image(encoded(250))
        assert _free(small_room) == 9
        other = read_image(encoded(250))  # one thread has one large image at a time
        assert _free(small_room) == 9
    assert _free(small_room) == 16
    read_image(encoded(250))  # outside nothing is held
    assert _free(small_room) == 16 and image.size == other.size


def test_a_failure_gives_the_room_back(small_room) -> None:
    data = bytearray(encoded(250))
    data[len(data) // 2] ^= 1
    for _ in range(5):
        with pytest.raises(read.ImageError), room.one_by_one():
            read_image(bytes(data))
    assert _free(small_room) == 16


def test_a_fork_has_a_room_of_its_own(small_room) -> None:
    small_room.take(MIB)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=read_image, args=(encoded(250),))
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_workers_share_one(monkeypatch) -> None:
    monkeypatch.setattr(room, "_UNIT", MIB // 16)
    monkeypatch.setattr(room.Room.__init__, "__defaults__", (MIB, threading))
    done = list(ordered_map(_timed, [encoded(250)] * 4, 4))
    # Each holds its half megabyte until it is done: of four never more than two at once.
    most = max(sum(a <= begin < b for a, b in done) for begin, _ in done)
    assert most <= 2


def _timed(data: bytes) -> tuple[float, float]:
    read_image(data)
    begin = time.monotonic()
    time.sleep(0.2)
    return begin, time.monotonic()


def _free(mine: room.Room) -> int:
    return mine._free._value


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16", "F", "L", "RGB", "CMYK"])
def test_strips_are_the_same_to_the_bit(mode: str, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    if mode == "F":
        image = Image.fromarray(rng.random((37, 53), dtype=np.float32))
    elif mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, (37, 53), dtype=np.uint16))
        image.info["transparency"] = int(np.asarray(image)[3, 3])
    else:
        noise = rng.integers(0, 256, (37, 53, 4), dtype=np.uint8)
        image = Image.fromarray(noise, "RGBA")
        image = image if mode == "RGBA" else image.convert("RGB").convert(mode)
        if mode in ("P", "RGB", "L"):
            image.info["transparency"] = (1, 2, 3) if mode == "RGB" else 7
        if mode == "LA":
            image = Image.fromarray(noise, "RGBA").convert("LA")
    whole = read_image(image)
    monkeypatch.setattr(read, "_BAND", 53 * 5)
    assert read_image(image).tobytes() == whole.tobytes()
