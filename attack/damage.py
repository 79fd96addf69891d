"""What is done to a file: flipped bits, cuts, lies. Each is a function of bytes and a generator."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

Damage = Callable[[bytes, random.Random], bytes]

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
_ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, -(10**400), 1e308, -0.0, 1e-320, "", "x",
    "\u0000", "\ud800", "../../x", "/etc/passwd", "http://127.0.0.1:9/x", "9" * 5000, "a" * 100_000,
    [], {}, [[]], {"": None}, [None] * 1000, ["x"], [1.5], {"x": 1},
)  # fmt: skip
_ODD_TEXT = (
    "[" * 100_000, '{"a":' * 5000, "NaN", "1e999", "-Infinity", "null", "[]", "{}", '""', "0",
    "9" * 5000, "{", "\ufeff{}", '{"a": 1, "a": 2}',
)  # fmt: skip


# ------------------------------------------------------------------------------------------- bytes


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((2, 8, 64))):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def flip_early(data: bytes, rng: random.Random) -> bytes:
    """In the first bytes, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(min(len(data), rng.choice((16, 64, 512))))] = rng.randrange(256)
    return bytes(changed)


def flip_late(data: bytes, rng: random.Random) -> bytes:
    """In the last bytes, where tables of contents are."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[-1 - rng.randrange(min(len(data), rng.choice((16, 64, 512))))] = rng.randrange(256)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((rng.randrange(len(data)), rng.randrange(min(len(data), 64))))]


def cut_the_end(data: bytes, rng: random.Random) -> bytes:
    return data[: -rng.randint(1, min(16, len(data)))]


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\0", rng.randbytes(64), data, b"\n", b"{}"))


def blank(data: bytes, rng: random.Random) -> bytes:
    """A block of zeros, as a disk that lost power leaves."""
    start = rng.randrange(len(data))
    size = rng.choice((16, 512, 4096))
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def copy_within(data: bytes, rng: random.Random) -> bytes:
    """A block written over another."""
    size = rng.randint(1, max(1, len(data) // 4))
    source, target = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:target] + data[source : source + size] + data[target + size :]


def insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.choice((1, 7, 300))) + data[place:]


def remove(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.choice((1, 7, 300)) :]


def number(data: bytes, rng: random.Random) -> bytes:
    """Another number, of a size that fields have, somewhere or early."""
    kind = rng.choice(("B", "<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(kind)
    value = rng.choice(_NUMBERS) % 256**size
    place = rng.randrange(max(1, rng.choice((64, len(data))) - size))
    return data[:place] + struct.pack(kind, value) + data[place + size :]


BYTES: tuple[Damage, ...] = (
    flip_bit, flip_bit, flip_bytes, flip_early, flip_late, cut, cut_the_end, empty, append, blank,
    copy_within, insert, remove, number,
)  # fmt: skip


# -------------------------------------------------------------------------------------------- text


def odd_json(data: bytes, rng: random.Random) -> bytes:
    """A value of a JSON document, however deep, replaced by an odd one, or a field removed."""
    try:
        table = json.loads(data)
    except ValueError:
        return flip_bytes(data, rng)
    return json.dumps(_odd(table, rng)).encode()


def _odd(table: Any, rng: random.Random) -> Any:
    places = list(_places(table, ())) if isinstance(table, (dict, list)) else []
    if not places:
        return rng.choice(_ODD)
    path = rng.choice(places)
    inner = table
    for part in path[:-1]:
        inner = inner[part]
    how = rng.randrange(8)
    if how == 0:
        del inner[path[-1]]
    elif how == 1 and isinstance(inner, dict):
        inner[rng.choice(("", "x", "__class__", "a\nb"))] = inner.pop(path[-1])
    elif how == 2:
        inner[path[-1]] = _near(inner[path[-1]], rng)
    else:
        inner[path[-1]] = rng.choice(_ODD)
    return table


def _near(value: Any, rng: random.Random) -> Any:
    """Something of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice((-value, value + 1, value * 10**6, value / 3, 0, str(value)))
    if isinstance(value, str):
        return value[::-1] if value and rng.random() < 0.5 else value + "x"
    if isinstance(value, list):
        return value + value[:1] if rng.random() < 0.5 else value[:-1]
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in list(entries):
        yield (*path, name)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*path, name))


def odd_text(data: bytes, rng: random.Random) -> bytes:
    """The whole text another, or one inside it."""
    new = rng.choice(_ODD_TEXT).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        return new
    place = rng.randrange(len(data) + 1)
    return data[:place] + new + data[place:]


def odd_value(data: bytes, rng: random.Random) -> bytes:
    """What stands after a `=` or a `:` replaced (TOML, tables, lists)."""
    text = data.decode("utf-8", "replace")
    found = list(re.finditer(r"(?<=[=:])\s*[^\n,}\]]+", text))
    if not found:
        return odd_line(data, rng)
    one = rng.choice(found)
    values = ("1e999", "nan", "-1", "9" * 400, '"x"', "[]", "{}", "true", "[[1]]", "1979-05-27",
              "''", '"' + "y" * 9000 + '"', "[" * 5000, "0", "1.5")  # fmt: skip
    new = text[: one.start()] + " " + rng.choice(values) + text[one.end() :]
    return new.encode("utf-8", "surrogatepass")


def odd_line(data: bytes, rng: random.Random) -> bytes:
    """A line dropped, doubled or replaced."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    new = rng.choice(([], [lines[place]] * 2, [b"\0"], [b"x" * 10_000], [b"\xff\xfe"], [b"a\tb\tc"],
                      [b"[x]"], [b'extends = "nothing.toml"'], [b"../../x.png"]))  # fmt: skip
    return b"\n".join(lines[:place] + new + lines[place + 1 :])


TEXT: tuple[Damage, ...] = (odd_text, odd_value, odd_line, flip_bit, flip_bytes, cut, empty, blank)
JSON: tuple[Damage, ...] = (odd_json, odd_json, odd_json, odd_json, *TEXT)


# --------------------------------------------------------------------------------------- containers


def lie_in_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A valid header that says something else: shapes, dtypes, offsets, the texts in it."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return flip_early(data, rng)
    texts = header.get("__metadata__")
    if texts and rng.random() < 0.4:
        name = rng.choice(sorted(texts))
        inner = texts[name].encode("utf-8", "replace")
        change = rng.choice((odd_json, odd_json, odd_text, odd_value, flip_bit))
        texts[name] = change(inner or b"x", rng).decode("utf-8", "replace")
    else:
        header = _odd(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


SAFETENSORS: tuple[Damage, ...] = (lie_in_safetensors, lie_in_safetensors, *BYTES)


def change_member(data: bytes, rng: random.Random) -> bytes:
    """A member of a zip archive damaged, with a checksum that fits it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError):
        return flip_bytes(data, rng)
    doomed = rng.choice(list(members))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", rng.choice((0, 0, 0, zipfile.ZIP_DEFLATED))) as archive:
        for info, content in members.items():
            name = info.filename
            if info is doomed:
                how = rng.randrange(5)
                if how == 0:
                    continue
                if how == 1:
                    name = rng.choice(("../../out", "/abs", name + "x", name.upper(), "a" * 300))
                else:
                    content = rng.choice(BYTES)(content or b"x", rng)
            archive.writestr(zipfile.ZipInfo(name), content)
    return made.getvalue()


def inflate_a_bomb(data: bytes, rng: random.Random) -> bytes:
    """A member that becomes far larger than the file, in an archive that is otherwise whole."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError):
        return flip_bytes(data, rng)
    doomed = rng.choice(list(members))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            bomb = content[:128] + bytes(rng.choice((10**7, 10**8)))
            archive.writestr(name, bomb if name == doomed else content)
    return made.getvalue()


ZIP: tuple[Damage, ...] = (*[change_member] * 6, *BYTES)
BOMBS = frozenset({inflate_a_bomb})


# ------------------------------------------------------------------------------------------ images


def png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    chunks, place = [], 8
    while place + 12 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    return chunks


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A PNG of these chunks, with checksums that are right."""
    made = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks:
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        made += len(content).to_bytes(4, "big") + kind + content + check
    return made


def splice_png(data: bytes, rng: random.Random) -> bytes:
    """A chunk dropped, doubled, moved or damaged, with a checksum that fits."""
    chunks = png_chunks(data)
    if not chunks:
        return flip_early(data, rng)
    place, how = rng.randrange(len(chunks)), rng.randrange(5)
    kind, content = chunks[place]
    if how == 0:
        del chunks[place]
    elif how == 1:
        chunks.insert(rng.randrange(len(chunks) + 1), chunks[place])
    elif how == 2:
        rng.shuffle(chunks)
    elif how == 3:
        chunks[place] = kind, rng.choice(BYTES)(content or b"x", rng)
    else:
        new = rng.choice((b"tRNS", b"iCCP", b"eXIf", b"zTXt", b"acTL", b"fcTL", b"PLTE", b"gAMA"))
        extra = rng.choice((rng.randbytes(40), b"x\0\0" + zlib.compress(bytes(10**7))))
        chunks.insert(rng.randrange(len(chunks)), (new, extra))
    return png_of(chunks)


def lie_of_png(data: bytes, rng: random.Random) -> bytes:
    """Another size, depth or colour in a PNG's header, with a checksum that fits."""
    chunks = png_chunks(data)
    if not chunks or len(chunks[0][1]) != 13:
        return flip_early(data, rng)
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    how = rng.randrange(4)
    if how < 3:
        width, height = _odd_size(width, height, rng)
    else:
        rest[rng.randrange(5)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    chunks[0] = chunks[0][0], struct.pack(">IIBBBBB", width, height, *rest)
    return png_of(chunks)


def _odd_size(width: int, height: int, rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.08:  # below every limit: seconds each
        return rng.choice(((13_000, 13_000), (1, 10**8), (9_000, 9_000), (60_000, 2_000)))
    return rng.choice(
        ((0, height), (width, 0), (width + 1, height), (height, width), (2**31 - 1, 1),
         (2**31 - 1, 2**31 - 1), (100_000, 100_000), (2_000, 1_000), (width * 2, height * 2))
    )  # fmt: skip


def lie_of_size(data: bytes, rng: random.Random) -> bytes:
    """Another size where the header of an image has it, whatever its format."""
    place, kind = _size_field(data)
    if place is None:
        return number(data, rng)
    width, height = _odd_size(64, 48, rng)
    top = 256 ** (struct.calcsize(kind) // 2) - 1
    new = struct.pack(kind, min(width, top), min(height, top))
    return data[:place] + new + data[place + len(new) :]


def _size_field(data: bytes) -> tuple[int | None, str]:
    if data[:3] == b"GIF":
        return 6, "<HH"
    if data[:2] == b"BM":
        return 18, "<II"
    if data[:4] == b"RIFF" and data[12:16] == b"VP8X":
        return 24, "<HH"
    if data[:2] == b"\xff\xd8":
        found = re.search(rb"\xff[\xc0-\xc2]\x00.\x08", data, re.DOTALL)
        return (found.end(), ">HH") if found else (None, "")
    place = data.find(b"ispe")  # AVIF, HEIC
    return (place + 8, ">II") if place >= 0 else (None, "")


def lie_of_tiff(data: bytes, rng: random.Random) -> bytes:
    """An entry of a TIFF's directory changed: size, strips, compression, counts."""
    order = "<" if data[:2] == b"II" else ">"
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, start)
        entry = start + 2 + 12 * rng.randrange(max(1, count))
        changed = bytearray(data)
        field = rng.choice((0, 2, 4, 8))
        value = rng.choice((*_NUMBERS, 13_000, 100_000))
        kind = f"{order}H" if field < 4 else f"{order}I"
        struct.pack_into(kind, changed, entry + field, value % 256 ** struct.calcsize(kind))
        return bytes(changed)
    except struct.error:
        return number(data, rng)


def tell_a_large_pnm(data: bytes, rng: random.Random) -> bytes:
    return re.sub(rb"\d+", lambda found: rng.choice((found[0], b"0", b"-1", b"99999", b"9" * 30)),
                  data[:20]) + data[20:]  # fmt: skip


_IMAGES: dict[str, tuple[Damage, ...]] = {
    "png": (*[splice_png] * 3, *[lie_of_png] * 3),
    "tiff": (lie_of_tiff,) * 6,
    "ppm": (tell_a_large_pnm,) * 3,
}
RESEALED = frozenset({splice_png, lie_of_png, change_member, inflate_a_bomb})
"""Those after which the checksums fit what is there."""


def image_damage(format: str) -> tuple[Damage, ...]:
    """What is done to images of a format, by the part before a dash of "png-rgb"."""
    return (*BYTES, *_IMAGES.get(format.partition("-")[0], (lie_of_size,) * 4))


class Mutant(NamedTuple):
    data: bytes
    how: str
    resealed: bool


def mutate(data: bytes, damages: tuple[Damage, ...], rng: random.Random) -> Mutant:
    """One or more kinds of damage, by the generator; never the undamaged bytes."""
    for _ in range(100):
        chosen = [rng.choice(damages) for _ in range(rng.choice((1, 1, 1, 2)))]
        made = data
        for damage in chosen:
            made = damage(made or b"\0", rng)
        if made != data:
            break
    names = "+".join(damage.__name__ for damage in chosen)
    return Mutant(made, names, any(damage in RESEALED for damage in chosen))
