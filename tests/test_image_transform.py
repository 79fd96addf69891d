"""Images on their way into a data set: one callable from the model's own settings."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from conftest import SMALLEST
from veca import DenseVit, Veca
from veca.errors import ImageError
from veca.images import ImageTransform, preprocess, read_image

MODEL = Veca(SMALLEST.replace(image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.6, 0.7)))


def noise(height: int, width: int) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    noise(60, 100).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_it_is_the_models_own(photo: Path) -> None:
    for model in (MODEL, DenseVit(MODEL.config)):
        whole = model.transform((48, 80), shape="squash")(photo)
        assert torch.equal(whole, model.preprocess(photo, (48, 80)).pixels[0])
        short = model.transform(48, shape="short")(photo)
        assert torch.equal(short, model.preprocess(photo, 48).pixels[0])
        square = model.transform(48)(photo)
        # The filter sees pixels beyond the edges of the middle, as where one scales and then cuts.
        middle = noise(60, 100).resize((48, 48), Image.Resampling.BICUBIC, box=(20, 0, 80, 60))
        assert torch.equal(square, model.preprocess(middle, (48, 48)).pixels[0])
        assert square.shape == (3, 48, 48) and square.dtype == torch.float32


def test_sources_and_sizes(photo: Path) -> None:
    transform = MODEL.transform(48)
    image = read_image(photo)
    for source in (str(photo), photo.read_bytes(), image, np.asarray(image)):
        assert torch.equal(transform(source), transform(photo))
    assert MODEL.transform(50)(photo).shape == (3, 48, 48)  # on the patch grid
    assert MODEL.transform((32, 64))(photo).shape == (3, 32, 64)
    assert torch.equal(MODEL.transform((32, 64))(noise(32, 64)),
                       MODEL.preprocess(noise(32, 64), None).pixels[0])  # fmt: skip


class Photos(Dataset):
    def __init__(self, paths: list[Path], transform: ImageTransform) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.paths[index])


def test_workers_of_a_loader_take_it(photo: Path, tmp_path: Path) -> None:
    noise(90, 40).save(tmp_path / "b.png")
    transform = MODEL.transform(32)
    again = pickle.loads(pickle.dumps(transform))
    assert again == transform and torch.equal(again(photo), transform(photo))
    data = Photos([photo, tmp_path / "b.png"], transform)
    (batch,) = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
    assert batch.shape == (2, 3, 32, 32)
    assert MODEL(batch, cores=4).patches.shape[1] == 4


def test_it_says_what_it_is() -> None:
    said = repr(MODEL.transform(50))
    assert "48 x 48" in said and "square" in said and "0.7" in said
    assert len(said) < 100 and "\n" not in said
    assert "short side 50" in repr(MODEL.transform(50, shape="short"))


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"size": 8}, "size"), ({"size": None}, "size"), ({"size": "48"}, "size"),
        ({"size": 48, "shape": "squeeze"}, "squash"), ({"size": 48, "max_pixels": 0}, "max_p"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_at_once(options: dict, noun: str) -> None:
    with pytest.raises(ImageError, match=noun):
        MODEL.transform(**options)


def test_faults_name_the_image(photo: Path) -> None:
    with pytest.raises(ImageError, match=r"gone\.png"):
        MODEL.transform(48)(photo.parent / "gone.png")
    with pytest.raises(ImageError, match=r"a\.png.*max_pixels=100"):
        MODEL.transform(48, max_pixels=100)(photo)


# ---------------------------------------------------------------------------------- float images


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floats_in_0_to_1_are_the_image_they_came_from(dtype: torch.dtype) -> None:
    image = noise(32, 48)
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    found = np.asarray(read_image((tensor.double() / 255).to(dtype))).astype(int)
    most = 1 if dtype == torch.bfloat16 else 0  # which has 8 bits for 256 values
    assert np.abs(found - np.asarray(image)).max() <= most
    if dtype != torch.bfloat16:
        array = tensor.permute(1, 2, 0).double().div(255).to(dtype).numpy()
        assert np.array_equal(np.asarray(read_image(array)), np.asarray(image))


def test_a_batch_is_several_images() -> None:
    batch = torch.rand(2, 3, 32, 48)
    out = preprocess(batch, model=MODEL, size=None)
    assert out.pixels.shape == (2, 3, 32, 48)
    apart = preprocess(list(batch), model=MODEL, size=None)
    assert torch.equal(out.pixels, apart.pixels)
    wanted = (batch - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).view(3, 1, 1)
    assert (out.pixels - wanted).abs().max() < 0.5 / 255 / 0.5 + 1e-6  # rounded to 8 bit


@pytest.mark.parametrize(
    ("values", "noun"),
    [
        (torch.full((3, 4, 4), 200.0), "divide it by 255"),
        (torch.full((3, 4, 4), 2e4), "scale it"),
        (torch.randn(3, 40, 40) * 2, "normalised already"),
        (torch.full((3, 4, 4), float("nan")), "nan"),
        (np.full((4, 4, 3), np.inf), "inf"),
    ],
)
def test_floats_out_of_range_are_refused_and_never_clipped(values: object, noun: str) -> None:
    with pytest.raises(ImageError, match=noun):
        read_image(values)


def test_a_rounding_error_is_no_range_error() -> None:
    values = np.full((2, 2, 3), 1 + 1e-6)
    values[0] = -1e-6
    assert read_image(values).getextrema() == ((0, 255),) * 3


def test_a_batch_prints_as_one_line() -> None:
    batch = preprocess(np.zeros((40, 60, 3), np.uint8), size=32)
    assert repr(batch) == "Preprocessed(pixels [1, 3, 32, 48], grid 2 x 3, float32, cpu)"
