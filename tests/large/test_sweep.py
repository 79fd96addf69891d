"""The pass over tiles against the plain forward, whatever the tiles, the spill and the end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import SMALLEST, stirred
from veca import create_model, large, load, rope, save
from veca._util.memory import peak_tensor_memory
from veca.errors import InputError, LargeError, OutputError
from veca.images import normalize
from veca.large import work

TOLERANCE = 1e-4  # of the features' mean magnitude


@pytest.fixture
def wide():
    """As `tiny`, with 64 cores."""
    return stirred(create_model(SMALLEST.replace(num_cores=64))).eval()


def photo(height=150, width=212):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def pixels_of(picture):
    """What the plain forward takes: filled up to whole patches by its last pixels."""
    fill = [(0, -side % 16) for side in picture.shape[:2]]
    filled = torch.from_numpy(np.pad(picture, (*fill, (0, 0)), mode="edge"))
    return normalize(filled.permute(2, 0, 1).float() / 255)[None]


@torch.no_grad()
def plain(model, picture, cores=None):
    return model(pixels_of(picture), cores)


@torch.no_grad()
def plain_masked(model, picture, mask, cores):
    """The plain forward over the patches that are there, as one list of tokens."""
    c = model.config
    there = torch.from_numpy(mask).flatten().nonzero().flatten()
    periods = rope.periods(c.head_width, c.rope_base, c.rope_zero_fraction)
    xy = rope.grid_coordinates(*mask.shape)[there]
    patches = model.patch_embed(pixels_of(picture)).flatten(2).transpose(1, 2)[:, there]
    tokens, raw = model.bank.prefix(cores)
    x, raw = torch.cat([tokens[None], patches], dim=1), raw[None]
    for number, block in enumerate(model.blocks):
        if number:
            raw = model.moves[number - 1](raw, x[:, :cores])
        places = rope.rotation(raw.tanh(), periods)
        x = block(x, cores, places, rope.rotation(xy[None], periods))
    x = model.project(model.norm(x))
    features = torch.zeros(mask.size, x.shape[-1])
    features[there] = x[0, cores:]
    return features.view(*mask.shape, -1).numpy(), x[:, :cores]


def agree(found, wanted):
    return np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).mean()


def agrees(out, wanted):
    grid = wanted.patches[0].view(*wanted.grid, -1).numpy()
    assert out.grid == wanted.grid
    assert agree(out.memory.cores.numpy(), wanted.cores.numpy())
    assert agree(out.memory.core_xy.numpy(), wanted.core_xy.numpy())
    return agree(out.features, grid)


@pytest.mark.parametrize("spill", ["memory", "disk", "recompute"])
@pytest.mark.parametrize("cores", [1, 8, 64])
def test_the_pass_is_the_plain_forward(wide, cores, spill, tmp_path):
    picture = photo()
    out = large.features(wide, picture, cores=cores, spill=spill, tile=3, state=tmp_path / "state")
    assert agrees(out, plain(wide, picture, cores))
    assert list(tmp_path.iterdir()) == []  # states are gone


@pytest.mark.parametrize("shape", [(16, 16), (7, 300), (161, 15), (96, 96)])
def test_any_size_and_any_tile(tiny, shape):
    picture = photo(*shape)
    for tile in (1, 4, 100):
        assert agrees(large.features(tiny, picture, tile=tile), plain(tiny, picture))


def test_the_shipped_weights():
    model, picture = load("veca_tiny_patch16"), photo(200, 312)
    out = large.features(model, picture, cores=8, tile=5)
    assert agrees(out, plain(model, picture, 8))


def test_tolerances_tell_a_wrong_pass(tiny):
    """One patch shifted in one tile is seen, or the tests above would show nothing."""
    picture = photo()
    changed = picture.copy()
    changed[:16, :16] = 255 - changed[:16, :16]
    out = large.features(tiny, changed, tile=3)
    assert not agree(out.memory.cores.numpy(), plain(tiny, picture).cores.numpy())


@pytest.mark.parametrize("spill", ["memory", "disk", "recompute"])
def test_masked_patches_are_no_tokens(wide, spill, tmp_path):
    picture = photo()
    mask = np.random.default_rng(1).random((10, 14)) < 0.6
    mask[:3, :3] = False  # a whole tile
    out = large.features(
        wide, picture, cores=8, mask=mask, tile=3, spill=spill, state=tmp_path / "state"
    )
    features, cores = plain_masked(wide, picture, mask, 8)
    assert agree(out.features, features) and agree(out.memory.cores.numpy(), cores.numpy())
    assert not out.features[~mask].any()
    whole = plain(wide, picture, 8).patches[0].view(10, 14, -1).numpy()
    assert not agree(out.features[mask], whole[mask])

    # A tensor is a mask as well, and masked pixels are never read.
    class Watched(large.ArrayPicture):
        def window(self, top, left, height, width):
            assert (top, left) != (0, 0)
            return super().window(top, left, height, width)

    again = large.features(
        wide, Watched(picture), cores=8, mask=torch.from_numpy(mask), tile=3, spill=spill,
        state=tmp_path / "state",
    )  # fmt: skip
    assert np.array_equal(again.features, out.features)


def test_the_memory_reads_regions(tiny):
    picture = photo(96, 160)
    out = large.features(tiny, picture, tile=4)
    with torch.no_grad():
        found = tiny.read(out.memory, pixels_of(picture)[:, :, 32:80, 16:128], (32, 16))
    assert agree(found.patches[0].view(3, 7, -1).numpy(), out.features[2:5, 1:8])


def test_bfloat16(tiny):
    model, picture = tiny.bfloat16(), photo()
    wanted = model(pixels_of(picture))
    out = large.features(model, picture, tile=3)
    grid = wanted.patches[0].view(*wanted.grid, -1).float().detach().numpy()
    assert np.abs(out.features - grid).mean() < 0.01 * np.abs(grid).mean()


def test_pictures_of_every_kind(tiny, tmp_path):
    picture = photo()
    wanted = large.features(tiny, picture).features
    raw = tmp_path / "pixels.raw"
    picture.tofile(raw)
    mapped = np.memmap(raw, np.uint8, "r", shape=picture.shape)
    for same in (mapped, Image.fromarray(picture), large.ArrayPicture(picture)):
        assert np.array_equal(large.features(tiny, same).features, wanted)
    grey = picture[:, :, 0]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    assert np.array_equal(large.features(tiny, grey).features, large.features(tiny, three).features)


def test_a_file_of_features(tiny, tmp_path):
    picture, path = photo(), tmp_path / "new" / "features.npy"
    out = large.features(tiny, picture, path, tile=3, spill="disk")
    assert out.features is None
    found = np.load(path, mmap_mode="r")
    assert np.array_equal(found, large.features(tiny, picture, tile=3).features)
    assert names(path.parent) == ["features.npy"]
    half = large.NumpyWriter(tmp_path / "half.npy", "float16")
    large.features(tiny, picture, half, tile=3)
    assert np.array_equal(np.load(half.path), found.astype(np.float16))


# ------------------------------------------------------------------------------------- stopped


class Stopped(Exception):
    pass


def stop_at(limit):
    def progress(done, total):
        if done == limit:
            raise Stopped

    return progress


@pytest.mark.parametrize("spill", ["memory", "disk", "recompute"])
@pytest.mark.parametrize("stops", [(1,), (20,), (21, 22), (7, 33, 60)])
def test_a_stopped_pass_goes_on_where_it_was(tiny, tmp_path, spill, stops):
    picture, path = photo(), tmp_path / "features.npy"
    wanted, whole = tmp_path / "wanted.npy", []
    large.features(tiny, picture, wanted, tile=3, progress=lambda *a: whole.append(a))
    assert whole[-1] == (60, 60) and len(whole) == 60  # 4 x 5 tiles, 3 layers
    before = 0
    for stop in stops:
        told = []
        with pytest.raises(Stopped):
            large.features(
                tiny, picture, path, tile=3, spill=spill,
                progress=lambda *a, s=stop, t=told: (t.append(a[0]), stop_at(s)(*a)),
            )  # fmt: skip
        assert told[0] == before + 1
        assert not path.exists()
        before = stop
    told = []
    large.features(tiny, picture, path, tile=3, spill=spill, progress=lambda *a: told.append(a[0]))
    assert told == list(range(before + 1, 61))
    assert path.read_bytes() == wanted.read_bytes()
    assert names(tmp_path) == ["features.npy", "wanted.npy"]


def test_features_in_memory_are_made_again(tiny, tmp_path):
    """The last layer's tiles went with the process; the layers before it did not."""
    picture, state, told = photo(), tmp_path / "state", []
    with pytest.raises(Stopped):
        large.features(tiny, picture, state=state, tile=3, progress=stop_at(50))
    out = large.features(tiny, picture, state=state, tile=3, progress=lambda *a: told.append(a[0]))
    assert told[0] == 41
    assert np.array_equal(out.features, large.features(tiny, picture, tile=3).features)


@pytest.mark.parametrize("damage", ["sums", "flipped", "states", "layer", "empty"])
def test_what_is_damaged_is_computed_again(tiny, tmp_path, damage):
    picture, state = photo(), tmp_path / "state"
    wanted = large.features(tiny, picture, tile=3).features
    with pytest.raises(Stopped):
        large.features(tiny, picture, state=state, tile=3, spill="disk", progress=stop_at(50))
    if damage == "sums":
        (state / "sums.safetensors").write_bytes(b"half")
    elif damage == "flipped":  # among the sums' numbers
        path = state / "sums.safetensors"
        path.write_bytes(path.read_bytes()[:-70] + b"\x3e" + path.read_bytes()[-69:])
    elif damage == "layer":
        path = state / "layer-003.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "empty":
        (state / "states.bin").unlink()
    else:
        data = bytearray((state / "states.bin").read_bytes())
        for place in range(500, len(data), 997):
            data[place] ^= 255
        (state / "states.bin").write_bytes(data)
    out = large.features(tiny, picture, state=state, tile=3, spill="disk")
    assert np.array_equal(out.features, wanted)


def test_another_pass_in_the_same_folder_is_refused(tiny, tmp_path):
    picture, state = photo(), tmp_path / "state"

    def run(model=tiny, picture=picture, **options):
        large.features(model, picture, state=state, **{"tile": 3, "cores": 5, **options})

    with pytest.raises(Stopped):
        run(progress=stop_at(30))
    other = stirred(create_model(SMALLEST)).eval()
    mask = np.ones((10, 14), bool)
    mask[0, 0] = False
    for change, noun in (
        ({"cores": 4}, "cores"),
        ({"tile": 4}, "tile"),
        ({"mask": mask}, "mask"),
        ({"model": other}, "weights"),
        ({"picture": 255 - picture}, "picture"),
    ):
        with pytest.raises(LargeError, match=f"another {noun}"):
            run(**change)
    run()
    assert not state.exists()


def test_a_folder_with_other_things_is_left_alone(tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(LargeError, match="other things"):
        large.features(tiny, photo(), state=tmp_path)
    assert names(tmp_path) == ["mine.txt"]


SCRIPT = """
import sys, time
import numpy as np, torch
from veca import large, load
torch.set_num_threads(1)
picture = np.load(sys.argv[1])
def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.01)
large.features(load(sys.argv[2]), picture, sys.argv[3], tile=3, spill="disk", progress=slowly)
"""


@pytest.mark.slow
def test_killed_and_resumed_to_the_byte(tiny, tmp_path):
    picture, out = tmp_path / "picture.npy", tmp_path / "features.npy"
    np.save(picture, photo())
    weights = save(tiny, tmp_path / "weights.safetensors")
    large.features(tiny, photo(), tmp_path / "wanted.npy", tile=3)
    command = [sys.executable, "-c", SCRIPT, str(picture), str(weights), str(out)]
    seen = []
    for kill_after in (1, 17, 5, 100):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = []
            for line in process.stdout:
                lines.append(int(line))
                if len(lines) == kill_after:
                    process.send_signal(signal.SIGKILL)
                    break
        seen += lines[:1]
    assert seen == [1, 1, 17, 21]  # each goes on at the last 16 tiles, or the layer
    assert out.read_bytes() == (tmp_path / "wanted.npy").read_bytes()


# ------------------------------------------------------------------------------- limits, bad input


def test_memory_decides_on_tiles_and_spill(tiny, tmp_path):
    size = (20_000, 30_000)
    rich = large.estimate(tiny, size, memory="20GB")
    poor = large.estimate(tiny, size, memory="100MB")
    disk = large.estimate(tiny, size, memory="100MB", state=tmp_path)
    tight = large.estimate(tiny, size, memory="8MB")
    assert (rich.spill, poor.spill, disk.spill) == ("memory", "recompute", "disk")
    assert rich.side == poor.side == 32 > tight.side
    for one, limit in ((rich, 20e9), (poor, 100e6), (disk, 100e6), (tight, 8e6)):
        assert one.memory_bytes <= limit and "\n" not in str(one)
    assert disk.disk_bytes > 1250 * 1875 * 32 * 4 and poor.work > 1.5 > disk.work
    assert large.estimate(tiny, (150, 212), "x.npy", memory="1GB").spill == "memory"
    with pytest.raises(LargeError, match="too little"):
        large.estimate(tiny, size, memory="100kB")
    with pytest.raises(LargeError, match="recompute"):
        large.estimate(tiny, size, memory="50MB", spill="memory")


def test_a_full_disk_is_told_before_the_work(tiny, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="free"):
        large.features(tiny, photo(), tmp_path / "features.npy", tile=3, spill="disk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("picture", "noun"),
    [(photo().astype(float), "uint8"), (photo()[:, :, :2], "uint8"), (photo()[:0], "uint8"),
     (7, "Picture")],
)  # fmt: skip
def test_no_picture(tiny, picture, noun):
    with pytest.raises(LargeError, match=noun):
        large.features(tiny, picture)


def test_bad_options(tiny, tmp_path):
    picture = photo()
    cases = [
        ({"mask": np.ones((3, 3), bool)}, LargeError, "mask"),
        ({"mask": np.ones((10, 14))}, LargeError, "mask"),
        ({"mask": np.zeros((10, 14), bool)}, LargeError, "mask"),
        ({"spill": "tape"}, InputError, "spill"),
        ({"spill": "disk"}, LargeError, "state"),
        ({"memory": "much"}, InputError, "bytes"),
        ({"cores": 9}, InputError, "cores"),
        ({"tile": 0}, InputError, "tile"),
        ({"out": tmp_path / "features.zip"}, OutputError, "npy"),
        ({"out": 7}, OutputError, "writer"),
    ]
    for options, kind, noun in cases:
        with pytest.raises(kind, match=noun):
            large.features(tiny, picture, **options)
    with pytest.raises(InputError, match="eval"):
        large.features(tiny.train(), picture)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails(tiny, tmp_path):
    class Broken(large.ArrayPicture):
        def window(self, top, left, height, width):
            if top:
                raise OSError("truncated")
            return super().window(top, left, height, width)

    class Wrong(large.ArrayPicture):
        def window(self, top, left, height, width):
            return super().window(top, left, height, width)[:-1]

    with pytest.raises(LargeError, match="truncated"):
        large.features(tiny, Broken(photo()), tmp_path / "f.npy", tile=3)
    with pytest.raises(LargeError, match="window"):
        large.features(tiny, Wrong(photo()), tile=3)
    # The file is whole again: nothing was lost.
    told = []
    large.features(tiny, photo(), tmp_path / "f.npy", tile=3, progress=lambda *a: told.append(a[0]))
    assert told[0] == 6


def test_what_a_kill_leaves_half_written_goes(tiny, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / ".manifest.json.999999999-0123abcd.tmp").write_text("{")
    with pytest.raises(Stopped):
        large.features(tiny, photo(), state=state, tile=3, progress=stop_at(50))
    (state / ".layer-003.safetensors.999999999-0123abcd.tmp").write_bytes(b"half")
    (state / "sums.new").write_bytes(b"half")
    large.features(tiny, photo(), state=state, tile=3)
    assert not state.exists()


@pytest.mark.parametrize("moment", [7, 40])
def test_a_folder_that_is_removed_meanwhile_is_told(tiny, tmp_path, moment):
    out = tmp_path / "out" / "features.npy"

    def remove(done, total):
        if done == moment:
            shutil.rmtree(out.parent)

    with pytest.raises(OutputError, match=r"features\.npy"):
        large.features(tiny, photo(), out, tile=3, spill="disk", progress=remove)
    again = large.features(tiny, photo(), out, tile=3, spill="disk")
    assert again.grid == (10, 14) and names(out.parent) == ["features.npy"]


def test_two_passes_do_not_share_a_folder(tiny, tmp_path):
    def inside(done, total):
        with pytest.raises(OutputError, match="another pass"):
            large.features(tiny, photo(), state=tmp_path / "state", tile=3)

    large.features(tiny, photo(), state=tmp_path / "state", tile=10, progress=inside)


@pytest.mark.parametrize("spill", ["memory", "recompute"])
def test_memory_stays_below_the_estimate(wide, spill, monkeypatch):
    """Live tensors; the picture and the features are not counted, as the estimate says."""
    # The profiler sees its own thread alone.
    monkeypatch.setattr(work, "compute_ahead", lambda compute, batches, **_: map(compute, batches))
    picture = photo(512, 768)
    for tile in (8, 16):
        estimated = large.estimate(wide, picture, tile=tile, spill=spill)
        out, peak = peak_tensor_memory(
            lambda t=tile: large.features(wide, picture, Nowhere(), tile=t, spill=spill), "cpu"
        )
        assert out.features is None and peak <= estimated.memory_bytes
        assert peak >= 0.1 * estimated.memory_bytes  # an estimate, not a guess


class Nowhere:
    def begin(self, layout, resumed):
        return True

    def add(self, row, column, features):
        pass

    def finish(self, memory):
        pass

    def close(self):
        pass
