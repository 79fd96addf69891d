"""Decoding no more than needed, and the shapes images are stored in."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from data.pictures import encoded, picture
from veca.data import BadImageError, DataError
from veca.data.decode import EncodedImage, shaped


def test_a_jpeg_is_decoded_at_a_reduced_size_only_when_asked() -> None:
    data = encoded(picture(0, 400, 600), "JPEG", quality=95)
    image = EncodedImage(data, "a.jpg")
    assert image.size == (400, 600)
    assert image.decode(0.3).size == (300, 200)  # half: the next smaller, 1/4, is below 0.3
    assert EncodedImage(data, "a.jpg").decode(0.25).size == (150, 100)
    assert EncodedImage(data, "a.jpg").decode(0.01).size == (75, 50)
    whole = EncodedImage(data, "a.jpg").decode()
    assert whole.size == (600, 400)
    assert np.array_equal(np.asarray(whole), np.asarray(EncodedImage(data, "a").decode(1.5)))
    reduced = EncodedImage(data, "a.jpg").decode(0.5)
    wanted = whole.resize((300, 200), Image.Resampling.BOX)
    assert np.abs(np.asarray(reduced).astype(int) - np.asarray(wanted)).mean() < 2


def test_the_size_is_that_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = encoded(picture(0, 40, 80), "JPEG", exif=exif)
    image = EncodedImage(lying, "a.jpg")
    assert image.size == (80, 40)
    assert image.decode(0.5).size == (20, 40)
    png = EncodedImage(encoded(picture(0, 40, 80)), "a.png")
    assert png.size == (40, 80) and png.decode(0.1).size == (80, 40)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello", "format"),
        (encoded(picture(0), "JPEG")[:600], "decoded"),
        (encoded(picture(0))[:600], "decoded"),
        (b"\xff\xd8\xff", "format"),
    ],
)
def test_a_bad_image_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason) as caught:
        EncodedImage(data, "some/photo.jpg").decode()
    assert caught.value.name == "some/photo.jpg"
    assert "preprocess" not in str(caught.value)


def stored(image: Image.Image, size: int, mode: str) -> np.ndarray:
    return np.asarray(shaped(EncodedImage(encoded(image), "a.png"), size, mode))


def test_stored_shapes() -> None:
    image = picture(1, 60, 90)
    bicubic = Image.Resampling.BICUBIC
    assert np.array_equal(stored(image, 30, "short"), np.asarray(image.resize((45, 30), bicubic)))
    assert np.array_equal(stored(image, 100, "short"), np.asarray(image))  # never enlarged
    middle = image.resize((30, 30), bicubic, box=(15, 0, 75, 60))
    assert np.array_equal(stored(image, 30, "square"), np.asarray(middle))
    assert np.array_equal(stored(image, 30, "squash"), np.asarray(image.resize((30, 30), bicubic)))
    assert stored(image, 100, "square").shape == (100, 100, 3)
    with pytest.raises(DataError, match="'squar'"):
        stored(image, 30, "squar")
