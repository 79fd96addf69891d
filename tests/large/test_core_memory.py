"""Regions read from the cores' memory, against the pass over the whole picture."""

from __future__ import annotations

import pytest
import torch

from conftest import SMALLEST, stirred
from veca import CoreMemory, Veca, create_model, load
from veca.errors import CoreMemoryError, InputError

PICTURE = (1, 3, 96, 144)  # 6 x 9 patches


def region(images, at, shape):
    return images[:, :, at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]]


def patches_there(out, at, shape):
    row, column, height, width = (side // 16 for side in (*at, *shape))
    return out.feature_map()[:, :, row : row + height, column : column + width]


@pytest.fixture
def images():
    return torch.randn(PICTURE)


@pytest.mark.parametrize("cores", [1, 5, None])
@pytest.mark.parametrize(
    ("at", "shape"), [((0, 0), (96, 144)), ((32, 48), (16, 16)), ((16, 0), (48, 144))]
)
def test_a_region_is_that_of_the_whole(tiny, images, cores, at, shape):
    out, memory = tiny.remember(images, cores)
    whole = tiny(images, cores)
    for name in ("patches", "cores", "core_xy"):
        assert torch.equal(out[name], whole[name])
    found = tiny.read(memory, region(images, at, shape), at)
    assert found.grid == (shape[0] // 16, shape[1] // 16)
    torch.testing.assert_close(
        found.feature_map(), patches_there(whole, at, shape), atol=1e-5, rtol=0
    )
    assert torch.equal(found.cls, whole.cls) and torch.equal(memory.cls, whole.cls)
    assert memory.budget == whole.cores.shape[1] and memory.grid == (6, 9)


def test_the_shipped_weights_read_exactly():
    model = load("veca_tiny_patch16")
    images = torch.randn(1, 3, 160, 240)
    with torch.no_grad():
        out, memory = model.remember(images)
        found = model.read(memory, region(images, (64, 32), (48, 112)), (64, 32))
    wanted = patches_there(out, (64, 32), (48, 112))
    assert (found.feature_map() - wanted).abs().max() < 1e-5 * wanted.abs().mean()


def test_a_region_needs_its_own_place(tiny, images):
    """The test above could not fail if the place did not matter."""
    out, memory = tiny.remember(images)
    elsewhere = tiny.read(memory, region(images, (0, 0), (32, 32)), (32, 64))
    assert (elsewhere.feature_map() - patches_there(out, (0, 0), (32, 32))).abs().max() > 1e-3


def test_regions_of_one_picture_in_a_batch(tiny, images):
    out, memory = tiny.remember(images)
    places = [(0, 16), (48, 80), (64, 0)]
    parts = torch.cat([region(images, at, (32, 64)) for at in places])
    found = tiny.read(memory, parts, places)
    wanted = torch.cat([patches_there(out, at, (32, 64)) for at in places])
    torch.testing.assert_close(found.feature_map(), wanted, atol=1e-5, rtol=0)
    assert found.cores.shape == (3, 8, 32)


def test_a_batch_of_pictures_has_a_region_each(tiny):
    images = torch.randn(2, 3, 64, 64)
    out, memory = tiny.remember(images)
    found = tiny.read(memory, region(images, (16, 32), (32, 32)), (16, 32))
    wanted = patches_there(out, (16, 32), (32, 32))
    torch.testing.assert_close(found.feature_map(), wanted, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="regions"):
        tiny.read(memory, torch.randn(3, 3, 32, 32), (0, 0))


def test_bfloat16(tiny, images):
    model = tiny.bfloat16()
    out, memory = model.remember(images)
    found = model.read(memory, region(images, (32, 32), (32, 64)), (32, 32))
    wanted = patches_there(out, (32, 32), (32, 64))
    assert found.patches.dtype == torch.bfloat16
    assert (found.feature_map() - wanted).abs().max() < 0.02 * wanted.abs().mean() + 1e-3


def test_gradients_of_a_region_are_those_of_the_whole(images):
    model = stirred(create_model(SMALLEST)).double().eval()
    images = images.double().requires_grad_()
    at, shape = (16, 32), (32, 48)
    wanted = torch.autograd.grad(
        patches_there(model(images), at, shape).square().sum(), [images, *model.parameters()]
    )
    _, memory = model.remember(images)
    found = model.read(memory, region(images, at, shape), at).patches.square().sum()
    grads = torch.autograd.grad(found, [images, *model.parameters()])
    for grad, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, right, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 0.0), (torch.float16, 0.01)])
def test_a_file_gives_the_memory_back(tiny, images, tmp_path, dtype, tolerance):
    out, memory = tiny.remember(images, 5)
    path = memory.save(tmp_path / "new" / "picture.safetensors", dtype=dtype)
    again = CoreMemory.load(path)
    assert (again.grid, again.patch_size, again.weights) == ((6, 9), 16, memory.weights)
    assert again.keys.dtype == (dtype or torch.float32) and again.core_xy.dtype == torch.float32
    part = region(images, (32, 0), (64, 96))
    found, kept = tiny.read(again, part, (32, 0)), tiny.read(memory, part, (32, 0))
    assert (found.patches - kept.patches).abs().max() <= tolerance * out.patches.abs().mean()
    assert found.patches.dtype == torch.float32


def test_half_precision_is_a_megabyte_for_small(tmp_path):
    model = Veca(create_model("small").config).eval()
    with torch.no_grad():
        _, memory = model.remember(torch.randn(1, 3, 32, 32))
    assert memory.save(tmp_path / "m.safetensors", dtype=torch.float16).stat().st_size < 1.3e6


def test_other_weights_are_refused(tiny, images, tmp_path):
    _, memory = tiny.remember(images)
    again = CoreMemory.load(memory.save(tmp_path / "m.safetensors"))
    other = stirred(create_model(SMALLEST)).eval()
    for one in (memory, again):
        with pytest.raises(CoreMemoryError, match="weights"):
            other.read(one, images, (0, 0))
    with torch.no_grad():
        tiny.norm.bias.add_(1)  # the same model, trained on
    with pytest.raises(CoreMemoryError, match="weights"):
        tiny.read(memory, images, (0, 0))


@pytest.mark.parametrize(
    ("at", "shape"),
    [((8, 0), (32, 32)), ((-16, 0), (32, 32)), ((80, 0), (32, 32)), ((0, 0), (112, 32)),
     ((0.0, 0), (32, 32)), ((0, 0, 0), (32, 32)), (0, (32, 32))],
)  # fmt: skip
def test_a_region_off_the_grid_or_outside(tiny, images, at, shape):
    _, memory = tiny.remember(images)
    with pytest.raises(InputError, match=r"region|places"):
        tiny.read(memory, torch.randn(1, 3, *shape), at)


def test_what_cannot_be_remembered(tiny, images):
    with pytest.raises(InputError, match="keep"):
        tiny.remember(images, keep=0.5)
    tiny.remember(images, keep=1)
    _, memory = tiny.remember(images)
    tiny.train()
    with pytest.raises(InputError, match="eval"):
        tiny.remember(images)
    with pytest.raises(InputError, match="eval"):
        tiny.read(memory, images, (0, 0))


def test_a_damaged_or_foreign_file(tiny, images, tmp_path):
    _, memory = tiny.remember(images)
    path = memory.save(tmp_path / "m.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CoreMemoryError, match="sha256"):
        CoreMemory.load(path)
    path.write_bytes(data[:500])
    with pytest.raises(CoreMemoryError, match="cannot read"):
        CoreMemory.load(path)
    from veca import save

    with pytest.raises(CoreMemoryError, match="no core memory"):
        CoreMemory.load(save(tiny, tmp_path / "weights.safetensors"))


def test_numbers_too_large_for_half_precision(tiny, images, tmp_path):
    with torch.no_grad():
        tiny.blocks[0].attn.v.bias.fill_(1e6)
    _, memory = tiny.remember(images)
    with pytest.raises(CoreMemoryError, match="dtype"):
        memory.save(tmp_path / "m.safetensors", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_one_line(tiny, images):
    line = repr(tiny.remember(images)[1])
    assert "grid 6 x 9" in line and "\n" not in line
