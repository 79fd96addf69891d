"""The code that travels with weights: whole, and the package's numbers where the package is not."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import veca
from conftest import SMALLEST, stirred
from veca.distill import publish
from veca.weights import processor, remote_code

PHOTO = Path(veca.__file__).parent / "assets" / "photos" / "chelsea.jpg"
AT_HAND = {"huggingface_hub", "numpy", "PIL", "safetensors", "torch", "transformers"}
AT_HAND |= sys.stdlib_module_names
"""What there is wherever transformers runs a model on images."""


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    return remote_code.source_files()


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("published")
    veca.save(stirred(veca.create_model(SMALLEST.replace(output_width=20))), place / "w")
    return publish(place / "w", place / "ready", dtype=torch.float32)


def _imports(text: str) -> tuple[set[str], set[str]]:
    """Names imported from elsewhere, and files imported from beside."""
    away, beside = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            away |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            away.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            beside |= {node.module} if node.module else {alias.name for alias in node.names}
    return away, beside


def test_the_code_needs_nothing_but_itself_and_what_transformers_has(code) -> None:
    for name, text in code.items():
        away, beside = _imports(text)
        assert away <= AT_HAND, name
        assert {f"{module}.py" for module in beside} <= set(code), name


def test_the_file_that_transformers_reads_names_every_other(code) -> None:
    _, beside = _imports(code[processor.CODE_FILE])
    assert {f"{module}.py" for module in beside} == set(code) - {processor.CODE_FILE}
    assert "veca_attention_sdpa.py" in code and "veca_attention_kernels.py" not in code


def test_what_is_published(published) -> None:
    config = json.loads((published / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_veca.VecaModel"
    assert "install veca" in config["auto_map"]["note"]
    settings = json.loads((published / "preprocessor_config.json").read_text())
    assert settings["auto_map"]["AutoImageProcessor"].endswith(settings["image_processor_type"])
    assert "trust_remote_code=True" in (published / "README.md").read_text()
    assert veca.load(published).config.output_width == 20


def test_without_code_there_is_none_nor_is_it_named(published, tmp_path) -> None:
    folder = publish(published, tmp_path / "ready")
    (folder / "veca_of_another_version.py").write_text("")
    publish(published, folder)
    assert not (folder / "veca_of_another_version.py").exists()
    publish(published, folder, code=False)
    assert not list(folder.glob("*.py"))
    for name in ("config.json", "preprocessor_config.json"):
        assert "auto_map" not in (folder / name).read_text()
    assert "trust_remote_code" not in (folder / "README.md").read_text()


def test_code_is_named_only_where_it_lies(published, tmp_path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    import veca.integrations.transformers as hf

    model = hf.VecaModel.from_pretrained(published)
    model.save_pretrained(tmp_path / "elsewhere")
    assert "auto_map" not in (tmp_path / "elsewhere" / "config.json").read_text()
    again = publish(published, tmp_path / "here")
    hf.VecaModel.from_pretrained(again).save_pretrained(again)
    assert "modeling_veca.VecaModel" in (again / "config.json").read_text()


WITHOUT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "veca":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch, transformers
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module

folder, plain, photo, out = sys.argv[1:]
code = {"trust_remote_code": True}
try:
    AutoModel.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    refusal = str(error)
try:
    AutoModel.from_pretrained(plain)
except ValueError as error:
    unknown = str(error)
model = AutoModel.from_pretrained(folder, **code)
pixels = AutoImageProcessor.from_pretrained(folder, **code)(photo, return_tensors="pt")
model.save_pretrained(out + "/again")
backbone = get_class_from_dynamic_module("modeling_veca.VecaBackbone", folder)
classifier = AutoModelForImageClassification.from_pretrained(folder, num_labels=3, **code)
classifier.save_pretrained(out + "/classifier")
with torch.no_grad():
    outputs = {
        "pixels": pixels["pixel_values"],
        "tokens": model(**pixels, cores=5).last_hidden_state,
        "map": backbone.from_pretrained(folder)(**pixels).feature_maps[0],
        "again": AutoModel.from_pretrained(out + "/again", **code)(**pixels, cores=5)[0],
        "logits": classifier(**pixels).logits,
        "reloaded": AutoModelForImageClassification.from_pretrained(out + "/classifier", **code)(
            **pixels
        ).logits,
        "hub": AutoModel.from_pretrained("owner/name", **code)(**pixels, cores=5)[0],
        "pooled": pipeline("image-feature-extraction", model=folder, **code)(
            photo, pool=True, return_tensors=True
        ),
    }
torch.save(outputs, out + "/outputs.pt")
ours = [name for name in sys.modules if name.partition(".")[0] == "veca"]
print(json.dumps({"refusal": refusal, "unknown": unknown, "ours": ours, "class": str(type(model))}))
"""


@pytest.fixture(scope="module")
def elsewhere(published, tmp_path_factory) -> tuple[Path, dict]:
    """What a process finds that has transformers and not this package."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    out = tmp_path_factory.mktemp("elsewhere")
    fetched = out / "home" / "hub" / "models--owner--name"  # as the hub's client leaves it
    (fetched / "refs").mkdir(parents=True)
    (fetched / "refs" / "main").write_text("0" * 40)
    shutil.copytree(published, fetched / "snapshots" / ("0" * 40))
    env = {**os.environ, "HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, (published, published.parent / "w", PHOTO, out))],
        env=env,
        capture_output=True,
        text=True,
        cwd=out,
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_numbers_are_the_packages_to_the_bit(published, elsewhere) -> None:
    out, facts = elsewhere
    assert facts["ours"] == [] and "modeling_veca.VecaModel" in facts["class"]
    found = torch.load(out / "outputs.pt")
    model = veca.load(published)
    assert torch.equal(found["pixels"], model.preprocess(PHOTO, size=(512, 512)).pixels)
    with torch.no_grad():
        wanted = model(found["pixels"], cores=5)
        whole = model(found["pixels"])
    assert torch.equal(found["tokens"], torch.cat([wanted.cores, wanted.patches], dim=1))
    assert torch.equal(found["map"], whole.feature_map())
    assert torch.equal(found["pooled"], whole.cls)
    assert torch.equal(found["hub"], found["tokens"])


@pytest.mark.slow
def test_what_is_saved_from_there_takes_the_code_along(elsewhere) -> None:
    out, _ = elsewhere
    found = torch.load(out / "outputs.pt")
    assert torch.equal(found["again"], found["tokens"])
    assert torch.equal(found["reloaded"], found["logits"])
    assert veca.load(out / "again").config.output_width == 20


@pytest.mark.slow
def test_untrusted_code_is_refused_with_a_way_to_what_it_is(published, elsewhere) -> None:
    """transformers' own words send the reader to the files, which name the package."""
    _, facts = elsewhere
    assert "trust_remote_code=True" in facts["refusal"] and str(published) in facts["refusal"]


@pytest.mark.slow
def test_weights_without_code_are_refused_with_the_packages_name(elsewhere) -> None:
    _, facts = elsewhere
    assert "model type `veca`" in facts["unknown"]
