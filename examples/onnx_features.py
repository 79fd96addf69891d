"""Dense features of an image from an exported ONNX file: onnxruntime, numpy and Pillow, no more.

    veca export my-weights --to onnx --out exported/
    python examples/onnx_features.py exported/my-weights_anycores.onnx photo.jpg --cores 32

The file says in its metadata how images are normalised and how large a patch is.
"""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepare(image: Image.Image, facts: dict, side: int) -> np.ndarray:
    """Pixels [1, 3, H, W]: the short side scaled to `side`, both on the patch grid, normalised."""
    patch = facts["patch_size"]
    if facts["size"] != "dynamic":
        height, width = facts["size"]
    else:
        scale = side / min(image.size)
        width, height = (max(1, round(x * scale / patch)) * patch for x in image.size)
    image = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.float32) / 255
    pixels = (pixels - np.float32(facts["image_mean"])) / np.float32(facts["image_std"])
    return pixels.transpose(2, 0, 1)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a .onnx file that `veca export` wrote")
    parser.add_argument("image")
    parser.add_argument("--cores", type=int, help="the budget, if the file takes any")
    parser.add_argument("--side", type=int, default=512, help="short side in pixels")
    parser.add_argument("--out", default="features.npz")
    args = parser.parse_args()

    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    facts = json.loads(session.get_modelmeta().custom_metadata_map["veca"])
    image = ImageOps.exif_transpose(Image.open(args.image))  # as the camera was held
    images = prepare(image, facts, args.side)
    inputs = {"images": images}
    if facts["cores"] == "any":
        inputs["cores"] = np.array(args.cores or facts["config"]["num_cores"], dtype=np.int64)
    elif args.cores not in (None, facts["cores"]):
        parser.error(f"{args.model} has {facts['cores']} cores; export one with --cores any.")

    names = ["cls", "patches", "core_tokens", "core_xy"]
    found = dict(zip(names, session.run(names, inputs), strict=True))
    rows, columns = (side // facts["patch_size"] for side in images.shape[2:])
    found["feature_map"] = found["patches"][0].reshape(rows, columns, -1)
    np.savez(args.out, **found)
    for name, value in found.items():
        print(f"{name:12} {value.dtype} {list(value.shape)}")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
