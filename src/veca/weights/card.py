"""A model card: what weights are, where they come from and how to use them, as the hub shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from veca._util.files import escaped
from veca.config import PRESETS, VecaConfig
from veca.cost import cost
from veca.errors import shown

FILE = "README.md"
RESULTS, _NEXT = "## Results", "## Architecture"
_PAPER = "https://arxiv.org/abs/2605.12491"
# Told in the text, or of no use to a reader of the card.
_ELSEWHERE = {"teacher", "teachers", "data", "licence", "license", "budgets", "init"}
_OF_A_STAGE = {"steps", "samples", "steps_planned", "sizes", "lr", "seed"}
_INTERNAL = {"file_sha256", "format_version", "standardised", "budget_weights", "derived_from"}


def model_card(
    config: VecaConfig,
    provenance: Mapping[str, Any] | None = None,
    *,
    name: str = "path/to/weights",
    tags: Sequence[str] = (),
    results: str = "",
    code: bool = False,
) -> str:
    """A README.md with the hub's header, written from the configuration and the provenance.

    Nothing is claimed that they do not say: without provenance the card says that the origin is
    not known.

    Args:
        name: what a reader passes to `from_pretrained` and `veca.load`.
        tags: for the header, besides the usual ones.
        results: Markdown for a section of that name.
        code: the model's code lies beside the weights, for transformers to run.
    """
    provenance = dict(provenance or {})
    tags = [*tags, "custom_code"] if code else tags
    parts = [
        _header(provenance, tags),
        _title(config, name, provenance.get("budgets")),
        _use(config, name, code),
        *([f"{RESULTS}\n\n{results.strip()}\n"] if results.strip() else []),
        _architecture(config),
        _origin(provenance),
        f"## Method\n\n[Elastic Attention Cores for Scalable Vision Transformers]({_PAPER}): "
        "patches attend only to a few learned cores, kept in an order that makes every prefix of "
        "them a model of its own.\n",
    ]
    return escaped("\n".join(parts))


def results_in(card: str) -> str:
    """What a card says under that heading; empty if nothing."""
    _, found, after = card.partition(f"\n{RESULTS}\n")
    return after.partition(f"\n{_NEXT}\n")[0].strip() if found else ""


def _header(provenance: Mapping[str, Any], tags: Sequence[str]) -> str:
    every = list(dict.fromkeys(["veca", "vision", "dense-features", *tags]))
    lines = ["---", "library_name: transformers", "pipeline_tag: image-feature-extraction"]
    licence = provenance.get("licence", provenance.get("license"))
    if isinstance(licence, str) and licence:
        lines.append(f"license: {json.dumps(licence)}")
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in every), "---", ""]
    return "\n".join(lines)


def _title(config: VecaConfig, name: str, budgets: Any) -> str:
    size = next((preset for preset, known in PRESETS.items() if _same_network(known, config)), None)
    kind = f"`{size}`" if size else "a VECA network of its own size"
    trained = ""
    if _are_sizes(budgets) and min(budgets) > 1:
        trained = (
            f" Trained with {min(budgets)} cores and more; smaller budgets run, but were not "
            "trained."
        )
    return (
        f"# {name.rstrip('/').rpartition('/')[2]}\n\n"
        f"Dense vision features at a cost you can dial: {kind}, whose patches talk only through at "
        f"most {config.num_cores} cores. One set of weights runs at any budget `cores` from 1 to "
        f"{config.num_cores}, at any image size on the {config.patch_size}-pixel grid.{trained}\n"
    )


def _are_sizes(value: object) -> bool:
    """Whether something that a file says is a list of whole numbers, at least one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(type(x) is int for x in value)


def _same_network(a: VecaConfig, b: VecaConfig) -> bool:
    names = ("depth", "width", "heads", "ffn_ratio", "num_cores", "patch_size")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _use(config: VecaConfig, name: str, code: bool) -> str:
    budget = min(32, config.num_cores)
    # transformers knows folders and hub ids; names are veca's own.
    place = name if "/" in name else f"path/to/{name}"
    text = f"""## Use

```python
import veca

model = veca.load("{name}")
batch = model.preprocess("photo.jpg", size=512)
out = model(batch.pixels, cores={budget})
out.cls, out.patches, out.feature_map()
```

With transformers (the extra `hf`; in a clone `pip install '.[hf]'`):

```python
import veca.integrations.transformers  # registers the classes
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained("{place}")
model = AutoModel.from_pretrained("{place}", dtype="float32")
out = model(**processor("photo.jpg", return_tensors="pt"), cores={budget})
out.pooler_output, out.patches
```
"""
    if code:
        text += f"""
Where veca is not installed, the code beside the weights does: transformers runs it if you say that
you trust it. It has the same classes and numbers, without the package's kernels for GPUs.

```python
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained("{place}", trust_remote_code=True)
model = AutoModel.from_pretrained("{place}", dtype="float32", trust_remote_code=True)
```
"""
    return text


def _architecture(config: VecaConfig) -> str:
    facts = cost(config, size=32 * config.patch_size)
    rows = {
        "layers": config.depth,
        "width": config.width,
        "heads": config.heads,
        "width of the features": config.feature_width,
        "cores": config.num_cores,
        "patch": f"{config.patch_size} x {config.patch_size} pixels",
        "parameters": f"{facts.veca.parameters / 1e6:.1f} M",
        "image mean, deviation": f"{list(config.image_mean)}, {list(config.image_std)}",
    }
    return f"{_NEXT}\n\n" + _table(rows)


def _origin(provenance: Mapping[str, Any]) -> str:
    if not provenance.keys() - {"code_version", "format_version", "tensors_sha256", "file_sha256"}:
        return "## Origin\n\nNot recorded with these weights.\n"
    rows: dict[str, Any] = {}
    if isinstance(provenance.get("derived_from"), Mapping):
        rows["changed since"] = "these weights differ from those whose origin follows"
        source = provenance["derived_from"]
        provenance = {**source, **{k: v for k, v in provenance.items() if k != "derived_from"}}
    teachers = provenance.get("teachers") or [provenance.get("teacher")]
    named = [_teacher(x) for x in (teachers if isinstance(teachers, list) else [teachers]) if x]
    if named:
        rows["teacher"] = named
    data = provenance.get("data")
    if isinstance(data, Mapping):
        images = _text(data.get("images", "?"))
        rows["data"] = f"{_text(data.get('source', 'unnamed'))}, {images} images"
        rows["data"] += f" (licence: {_text(data['licence'])})" if data.get("licence") else ""
    elif data:
        rows["data"] = data
    for key, label in (("licence", "licence"), ("license", "licence"), ("budgets", "budgets")):
        if provenance.get(key):
            rows[label] = provenance[key]
    stages = isinstance(provenance.get("init"), Mapping) and provenance["init"].get("provenance")
    for key, value in provenance.items():
        plain = value is None or isinstance(value, (str, int, float, bool, list))
        if plain and key not in _ELSEWHERE | _INTERNAL:
            last = " of the last stage" if stages and key in _OF_A_STAGE else ""
            rows[key.replace("_", " ") + last] = value
    return "## Origin\n\n" + _table(rows)


def _teacher(said: Any) -> str:
    if not isinstance(said, Mapping):
        return said if isinstance(said, str) else shown(said)
    name, licence = said.get("name", "unnamed"), said.get("licence", "unknown")
    return f"{_text(name)} (licence: {_text(licence)})"


def _table(rows: Mapping[str, Any]) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = ", ".join(_text(x) for x in value)
    return " ".join(_text(value).split()).replace("|", "\\|")


def _text(value: Any) -> str:
    """A value that a file says; it may be anything."""
    return value if isinstance(value, str) else shown(value)
