"""Running an exported file from Python as one runs the model, with the model's own checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from veca._util.device import usable_device
from veca._util.files import read_json
from veca.checks import check_budget, check_finite, check_images, check_keep
from veca.config import VecaConfig
from veca.errors import ExportError, InputError
from veca.export.graph import MIN_SIDE, report_of
from veca.export.onnx_file import OnnxRunner
from veca.export.torch_file import TorchRunner
from veca.merging import LEAST_OPEN_KEEP
from veca.outputs import VecaOutput
from veca.weights.store import file_hash


class ExportedModel:
    """An exported file that is called like the model: `exported(images, cores=8).patches`.

    Attributes:
        config: the architecture, as `Veca.config`.
        cores: the budget of the file, or None if it takes any.
        keep: the share of patch tokens that go on in it, or None if it takes any.
        size: (height, width) in pixels that the file is for, or None if it takes any.
        facts: everything the file says of itself.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: str = "cpu") -> None:
        self.path = Path(path).expanduser()
        _check_report(self.path)
        self._run: OnnxRunner | TorchRunner
        if self.path.suffix == ".onnx":
            self._run = OnnxRunner(self.path, device)
        elif self.path.suffix == ".pt2":
            self._run = TorchRunner(self.path, device)
        else:
            raise InputError(f"{path} is not an exported file; expected one ending in .onnx, .pt2.")
        self.facts: dict[str, Any] = self._run.facts
        try:
            self.config = VecaConfig.from_dict(self.facts["config"])
            self.cores = None if self.facts["cores"] == "any" else int(self.facts["cores"])
            keep = self.facts.get("keep", 1.0)
            self.keep = None if keep == "any" else float(keep)
            size = self.facts["size"]
            self.size = None if size == "dynamic" else (int(size[0]), int(size[1]))
        except (KeyError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise ExportError(
                f"{path} does not say what it is, so `veca export` did not write it; run it with "
                "onnxruntime or torch.export directly."
            ) from error

    def __call__(
        self, images: Tensor, cores: int | None = None, keep: float | None = None
    ) -> VecaOutput:
        """The outputs for `images` [B, 3, H, W] (float, normalised), as `Veca.forward` has them.

        `cores` and `keep` are needed only for a file that takes any, and there default to all.
        """
        grid = check_images(images, self.config.in_channels, self.config.patch_size)
        check_finite(images)
        budget = check_budget(self.cores if cores is None else cores, self.config.num_cores)
        if self.cores is not None and budget != self.cores:
            raise InputError(
                f"{self.path} was exported for {self.cores} cores, got cores={cores}; export it "
                f"for {cores}, or with cores 'any'."
            )
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            raise InputError(
                f"{self.path} was exported for images of {self.size[0]} x {self.size[1]} pixels, "
                f"got {images.shape[2]} x {images.shape[3]}; export it with size 'dynamic'."
            )
        if isinstance(self._run, TorchRunner) and self.size is None and min(grid) < MIN_SIDE:
            raise InputError(
                f"{self.path} takes images of at least {MIN_SIDE} patches a side, got "
                f"{grid[0]} x {grid[1]} patches; use a larger image, or export for that size."
            )
        share = check_keep(self.keep if keep is None else keep)
        if self.keep is not None and share != self.keep:
            raise InputError(
                f"{self.path} was exported for keep={self.keep:g}, got keep={share:g}; export it "
                "for that, or with keep 'any'."
            )
        if self.keep is None and share < LEAST_OPEN_KEEP:
            raise InputError(
                f"{self.path} takes a keep from {LEAST_OPEN_KEEP} to 1, got {share:g}; export it "
                "for that share."
            )
        out = self._run(images, budget, share)
        return VecaOutput(out["core_tokens"], out["patches"], out["core_xy"], grid)


def _check_report(path: Path) -> None:
    """Refuse a file that is not the one of the report beside it; without a report, nothing."""
    report = report_of(path)
    if not report.exists() or not path.is_file():
        return
    recorded = read_json(report, ExportError).get("sha256")
    if isinstance(recorded, str) and recorded != file_hash(path):
        raise ExportError(
            f"{path} is not the file of {report.name} beside it (its sha256 is another): it is "
            "damaged, or was changed since; export it again, or delete that report."
        )


def load_exported(path: str | os.PathLike[str], *, device: str = "cpu") -> ExportedModel:
    """Open a file that `export_model` or `veca export` wrote.

    Args:
        path: a .onnx file (needs onnxruntime) or a .pt2 file. The latter is a program: open only
            files from people you trust.
        device: "cpu" or "cuda"; for ONNX onnxruntime must have been built for it.
    """
    if not str(path).endswith(".onnx"):  # onnxruntime needs no torch for its devices
        usable_device(device)
    return ExportedModel(path, device=device)
