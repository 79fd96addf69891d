"""The authors' checkpoints: same outputs, exact round trip, clear refusals."""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from veca.config import PRESETS, VecaConfig, preset
from veca.errors import InputError, OutputError, WeightsError
from veca.model import Veca, create_model
from veca.weights import (
    convert_official,
    export_official,
    import_official,
    load,
    official,
    read_provenance,
)
from veca.weights.official_layout import expected
from veca.weights.official_settings import find_config, their_config
from weights import authors

OUTPUTS = {"same": None, "equal": "width", "wider": 320}


def checkpoint(path: Path, state: dict[str, Tensor], config: Any = None, **more: Any) -> Path:
    content = {"student": state, **({} if config is None else {"config": config}), **more}
    torch.save(content, path)
    return path


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    c = authors.settings()
    state = authors.state(c)
    return checkpoint(tmp_path / "x.pt", state, c), state, c


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("family", authors.FAMILIES)
def test_the_same_outputs(tmp_path: Path, family: str, output: str) -> None:
    c = authors.settings(family)
    c["distill_output_dim"] = c["hidden_dim"] if output == "equal" else OUTPUTS[output]
    state = authors.state(c)
    model = import_official(checkpoint(tmp_path / "x.pt", state, c))
    assert not model.training
    for height, width in ((32, 32), (32, 80), (64, 16)):
        images = torch.randn(2, 3, height, width)
        for budget in (1, 8, 13, 16):
            with torch.no_grad():
                cls, patches = authors.forward(state, c, images, budget)
                out = model(images, cores=budget)
            assert patches.abs().max() > 0.5
            torch.testing.assert_close(out.cls, cls, atol=1e-4, rtol=0)
            torch.testing.assert_close(out.patches, patches, atol=1e-4, rtol=0)


def test_a_file_as_their_training_writes_it(tmp_path: Path) -> None:
    """Optimisers, schedules and progress beside the weights: torch reads all of it safely."""
    c = authors.settings()
    state = authors.state(c)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    adam, muon = torch.optim.AdamW(layers.parameters()), torch.optim.Muon([layers[0].weight])
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    layers(torch.ones(1, 4)).sum().backward()
    for part in (adam, muon, schedule):
        part.step()
    weights = OrderedDict(state)
    weights._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as state_dict() does
    path = checkpoint(
        tmp_path / "x.pt",
        weights,
        c,
        optimizer=adam.state_dict(),
        optimizer_muon=muon.state_dict(),
        scheduler=schedule.state_dict(),
        global_step=7,
        best_val_avg_grid=float("inf"),
        best_val_avg_by_budget={"8": 0.25},
        pos_alpha=[0.5, 0.5],
        model_arch_version="v1",
    )
    model = import_official(path)
    assert torch.equal(model.norm.weight, state["final_norm.weight"])
    assert official.provenance(official.read_checkpoint(path))["global_step"] == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
def test_conversion_keeps_the_origin(
    small: tuple[Path, dict[str, Tensor], dict[str, Any]], tmp_path: Path, dtype: Any
) -> None:
    path, state, _ = small
    model = convert_official(path, tmp_path / "out", dtype=dtype)
    again = load(tmp_path / "out", dtype=None)
    assert again.config == model.config
    assert torch.equal(again.norm.weight, state["final_norm.weight"].to(dtype or torch.float32))
    assert read_provenance(tmp_path / "out")["teacher"] == "someone/teacher"


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_other_rotations(tmp_path: Path, fraction: float) -> None:
    c = authors.settings(rope_p_zero_freqs=fraction)
    state = authors.state(c)
    model = import_official(checkpoint(tmp_path / "x.pt", state, c))
    images = torch.randn(1, 3, 48, 32)
    with torch.no_grad():
        _, patches = authors.forward(state, c, images, 16)
        torch.testing.assert_close(model(images).patches, patches, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", authors.FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"distill_output_dim": 99}, {"num_layers": 1}])
def test_exact_round_trip(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    c = authors.settings(family, **changes)
    state = authors.state(c)
    model = import_official(checkpoint(tmp_path / "x.pt", state, c))
    path = export_official(model, tmp_path / "back.pt")
    back = torch.load(path, weights_only=True)
    assert list(back["student"]) == list(state), "all names, in their order"
    for name, tensor in state.items():
        assert back["student"][name].dtype == tensor.dtype
        assert torch.equal(back["student"][name], tensor), name
    assert back["config"].items() >= {k: v for k, v in c.items() if k in back["config"]}.items()
    again = import_official(path)
    assert again.config == model.config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_round_trip_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    c = authors.settings()
    state = {name: tensor.to(dtype) for name, tensor in authors.state(c).items()}
    path = checkpoint(tmp_path / "x.pt", state, c)
    assert import_official(path).norm.weight.dtype == torch.float32
    kept = import_official(path, dtype=None)
    back = torch.load(export_official(kept, tmp_path / "y.pt"), weights_only=True)["student"]
    assert all(torch.equal(back[n], t) and back[n].dtype == dtype for n, t in state.items())


def test_ours_to_theirs_and_back(tiny: Veca, tmp_path: Path) -> None:
    again = import_official(export_official(tiny, tmp_path / "x.pt"))
    assert again.config == tiny.config
    state = again.state_dict()
    assert all(torch.equal(state[name], t) for name, t in tiny.state_dict().items())


def test_pure_functions_on_dicts(tiny: Veca) -> None:
    theirs = official.from_ours(tiny)
    ours = official.to_ours(theirs, tiny.config)
    assert ours.keys() == tiny.state_dict().keys()
    assert all(torch.equal(ours[name], t) for name, t in tiny.state_dict().items())
    del theirs["pos_alpha"]
    with pytest.raises(WeightsError, match="pos_alpha"):
        official.to_ours(theirs, tiny.config)


@pytest.mark.parametrize(
    ("cores", "chunk", "count"), [(64, None, 8), (12, None, 3), (5, None, 5), (16, 4, 4)]
)
def test_chunks(cores: int, chunk: int | None, count: int, tmp_path: Path) -> None:
    model = create_model("tiny", depth=1, num_cores=cores)
    path = export_official(model, tmp_path / "x.pt", chunk=chunk)
    content = torch.load(path, weights_only=True)
    chunks = [name for name in content["student"] if name.startswith("query_token_chunks")]
    assert len(chunks) == count
    assert content["config"]["nested_budgets"][-1] == cores
    assert torch.equal(import_official(path).bank.tokens, model.bank.tokens)
    for bad in (0, -1, 2.0, True, 7):
        with pytest.raises(InputError, match="chunk"):
            export_official(model, path, chunk=bad)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ settings


def meta_state(config: VecaConfig) -> dict[str, Tensor]:
    return {n: torch.empty(shape, device="meta") for n, shape in expected(config, 8).items()}


@pytest.mark.parametrize("family", ["small", "splus", "base", "large"])
@pytest.mark.parametrize("output", [None, 1280])
def test_families(family: str, output: int | None) -> None:
    config = preset(family).replace(output_width=output)
    state = meta_state(config)
    assert find_config(state, {}) == config, "from shapes alone"
    assert find_config(state, {"model_family": family.upper()}) == config
    settings = their_config(config)
    assert settings["model_family"] == family
    assert settings["nested_budgets"] == (8, 16, 24, 32, 40, 48, 56, 64)
    assert settings["nested_budget_weights"] == (1, 1, 2, 2, 3, 3, 4, 4)
    assert find_config(state, settings) == config
    # Their loader lets the family win over what else is written.
    assert find_config(state, {**settings, "hidden_dim": 7, "num_heads": 7}) == config


def test_layout_of_the_helper_is_ours(tmp_path: Path) -> None:
    """The shapes written down by hand for these tests, at full size."""
    for family in ("small", "splus", "base", "large"):
        config = preset(family).replace(output_width=100)
        full = {**authors.settings(), **their_config(config)}
        assert expected(config, 8) == authors.shapes(full)


def test_single_settings_win_where_only_they_fit(tmp_path: Path) -> None:
    c = authors.settings(model_family="base")
    model = import_official(checkpoint(tmp_path / "x.pt", authors.state(c), c))
    assert (model.config.width, model.config.heads) == (128, 2)


def test_settings_are_translated(tmp_path: Path) -> None:
    c = authors.settings(
        rope_shift_coords=None,
        rope_jitter_coords=1.5,
        rope_rescale_coords=3.0,
        rope_p_zero_freqs=0.25,
        dropout=0.1,
        patch_size=8,
        in_channels=1,
        num_heads=4,
    )
    config = import_official(checkpoint(tmp_path / "x.pt", authors.state(c), c)).config
    assert (config.rope_shift, config.rope_jitter, config.rope_rescale) == (None, 1.5, 3.0)
    assert (config.rope_zero_fraction, config.dropout) == (0.25, 0.1)
    assert (config.patch_size, config.in_channels, config.heads) == (8, 1, 4)


def test_the_old_name_of_the_chunk_size(tmp_path: Path) -> None:
    c = authors.settings(matryoshka_chunk_size=4)
    del c["nested_chunk_size"]
    state = authors.state(c)
    model = import_official(checkpoint(tmp_path / "x.pt", state, c))
    assert model.config.num_cores == 16
    assert torch.equal(model.bank.tokens[4:8], state["query_token_chunks.1"][0])
    assert official.from_ours(model, chunk=4).keys() == state.keys()


def test_without_settings(tmp_path: Path) -> None:
    c = authors.settings("large", distill_output_dim=96)
    state = authors.state(c)
    torch.save(state, tmp_path / "bare.pt")
    config = import_official(tmp_path / "bare.pt").config
    assert config == VecaConfig(depth=5, width=256, heads=4, num_cores=16, output_width=96)
    overridden = import_official(tmp_path / "bare.pt", config_overrides={"heads": 8}).config
    assert overridden == config.replace(heads=8)


@pytest.mark.parametrize("ratio", [1.0, 2.66667, 3.999, 0.013, 7.77])
@pytest.mark.parametrize("width", [64, 192, 448, 1152])
def test_any_hidden_width_is_inferred(width: int, ratio: float) -> None:
    config = VecaConfig(width=width, heads=width // 64, depth=1, ffn_ratio=max(ratio, 1 / width))
    assert find_config(meta_state(config), {}).hidden_width == config.hidden_width


def test_heads_that_cannot_be_told(tmp_path: Path) -> None:
    c = authors.settings(hidden_dim=96, num_heads=3)
    torch.save(authors.state(c), tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="'heads'"):
        import_official(tmp_path / "x.pt")
    assert import_official(tmp_path / "x.pt", config_overrides={"heads": 3}).config.heads == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_embed_use_ln": True}, "patch_embed_use_ln"),
        ({"rope_zero_freqs_from": "high"}, "rope_zero_freqs_from"),
        ({"hidden_dim": 256}, "hidden_dim"),
        ({"num_layers": 4}, r"pos_linears\.2\.weight"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"num_query_tokens": 10**9}, "num_query_tokens"),
        ({"num_query_tokens": 24}, r"query_token_chunks\.2"),
        ({"mlp_ratio": 4.0}, "mlp_ratio"),
        ({"patch_size": 14}, "patch_size"),
        ({"distill_output_dim": 64}, r"output_proj\.weight"),
        ({"num_heads": 5}, "heads 5"),
        ({"num_heads": "two"}, "num_heads"),
        ({"dropout": 2.0}, "dropout"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = checkpoint(
        tmp_path / "x.pt", authors.state(authors.settings()), authors.settings(**changes)
    )
    with pytest.raises(WeightsError, match=words) as caught:
        import_official(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_repair_settings(tmp_path: Path) -> None:
    c = authors.settings()
    path = checkpoint(tmp_path / "x.pt", authors.state(c), {**c, "hidden_dim": 256})
    assert import_official(path, config_overrides={"width": 128}).config.width == 128
    with pytest.raises(WeightsError, match="'width'"):
        import_official(path, config_overrides={"widht": 128})


def test_a_family_alone_must_fit(tmp_path: Path) -> None:
    path = checkpoint(
        tmp_path / "x.pt", authors.state(authors.settings()), {"model_family": "base"}
    )
    with pytest.raises(WeightsError, match="hidden_dim"):
        import_official(path)


# --------------------------------------------------------------------------------- the tensors


@pytest.mark.parametrize("prefix", ["module.", "student.", "module.student.", "_orig_mod.module."])
@pytest.mark.parametrize("bare", [True, False])
def test_prefixes(tmp_path: Path, prefix: str, bare: bool) -> None:
    c = authors.settings()
    state = authors.state(c)
    named = {prefix + name: tensor for name, tensor in state.items()}
    torch.save(named if bare else {"student": named, "config": c}, tmp_path / "x.pt")
    model = import_official(tmp_path / "x.pt")
    assert torch.equal(model.norm.weight, state["final_norm.weight"])


def test_compiled_blocks(tmp_path: Path) -> None:
    c = authors.settings()
    named = {
        re.sub(r"^(blocks\.\d+\.)", r"\1_orig_mod.", k): v for k, v in authors.state(c).items()
    }
    import_official(checkpoint(tmp_path / "x.pt", named, c))


@pytest.mark.parametrize("with_settings", [True, False])
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blocks.1.fc1.weight", None, r"blocks\.1\.fc1\.weight"),
        ("pos_alpha", None, "missing.*pos_alpha"),
        ("qcoord_chunks.1", None, r"qcoord_chunks\.1"),
        ("query_token_chunks.0", None, r"query_token_chunks\.0"),
        ("patch_embed.proj.weight", None, r"patch_embed\.proj\.weight"),
        ("final_norm.bias", None, r"final_norm\.bias"),
        ("rope.periods", (8,), r"rope\.periods"),
        ("patch_embed.norm.weight", (128,), r"patch_embed\.norm\.weight"),
        ("blocks.0.attn.q_proj.weight", (128, 64), r"q_proj\.weight"),
        ("pos_alpha", (3,), r"pos_alpha.*\[3\]"),
        ("blocks.2.norm_attn.weight", (64,), r"norm_attn\.weight"),
        ("final_norm.weight", (), r"final_norm\.weight"),
    ],
)
def test_bad_tensors_are_named_in_their_words(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, words: str, with_settings: bool
) -> None:
    c = authors.settings()
    state = authors.state(c)
    if shape is None:
        del state[name]
    else:
        state[name] = torch.ones(shape)
    path = checkpoint(tmp_path / "x.pt", state, c if with_settings else None)
    with pytest.raises(WeightsError, match=words) as caught:
        import_official(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "noun"),
    [
        (torch.full((128,), float("nan")), "NaN"),
        (torch.full((128,), float("inf")), "NaN"),
        (torch.ones(128, dtype=torch.int64), "int64"),
        (torch.ones(128).to_sparse(), "sparse"),
        ([0.0] * 128, "list"),
    ],
)
def test_bad_values(
    small: tuple[Path, dict[str, Tensor], dict[str, Any]], value: Any, noun: str
) -> None:
    path, state, c = small
    checkpoint(path, {**state, "final_norm.bias": value}, c)
    with pytest.raises(WeightsError, match=r"final_norm\.bias") as caught:
        import_official(path)
    assert noun in str(caught.value).replace(str(path), ""), "the path holds the case's name"


def test_two_of_a_name(small: tuple[Path, dict[str, Tensor], dict[str, Any]]) -> None:
    path, state, c = small
    checkpoint(path, {**state, "module.pos_alpha": torch.ones(2)}, c)
    with pytest.raises(WeightsError, match="prefix"):
        import_official(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list"),
        ({"student": 3}, "dict of tensors"),
        ({"student": {}}, "holds none"),
        ({"epoch": 3, "model": {}}, "'epoch'"),
        ({"a.weight": torch.ones(2)}, r" a\.weight"),
        ({"student": {}, "config": [1]}, "'config'"),
    ],
)
def test_other_files_of_torch(tmp_path: Path, content: Any, words: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=words):
        import_official(tmp_path / "x.pt")


# ----------------------------------------------------------------------------------- the files


def test_truncated_anywhere(small: tuple[Path, dict[str, Tensor], dict[str, Any]]) -> None:
    path = small[0]
    whole = path.read_bytes()
    for length in (0, 1, 2, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=re.escape(str(path))):
            import_official(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="cut short"):
        import_official(path)


def test_paths_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none\.pt"):
        import_official(tmp_path / "none.pt")
    with pytest.raises(WeightsError, match="folder"):
        import_official(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(WeightsError, match=r"veca\.load"):
        import_official(tmp_path / "x.safetensors")
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(WeightsError, match=r"x\.txt"):
        import_official(tmp_path / "x.txt")
    with pytest.raises(InputError, match="dtype"):
        import_official(tmp_path / "x.txt", dtype=torch.int8)


def test_the_format_of_old_torch(tmp_path: Path) -> None:
    c = authors.settings()
    content = {"student": authors.state(c), "config": c}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert import_official(tmp_path / "old.pt").config.width == 128
    content["optimizer"] = Path("foreign")
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match=r"torch before 1\.6"):
        import_official(tmp_path / "old.pt")


def test_the_model_does_not_hang_on_the_file(
    small: tuple[Path, dict[str, Tensor], dict[str, Any]],
) -> None:
    path, state, _ = small
    model = import_official(path)
    path.write_bytes(b"")
    assert torch.equal(model.norm.weight, state["final_norm.weight"])
    model.norm.weight.data.zero_()


def test_export_is_atomic(tiny: Veca, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"old")

    def fail(content: object, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(official.torch, "save", fail)
    with pytest.raises(OutputError, match=r"x\.pt"):
        export_official(tiny, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("field", ["rope_base", "norm_eps", "image_mean"])
def test_export_refuses_what_their_code_cannot_do(tiny: Veca, tmp_path: Path, field: str) -> None:
    value = {"rope_base": 50.0, "norm_eps": 1e-6, "image_mean": (0.5, 0.5, 0.5)}[field]
    model = create_model(tiny.config, **{field: value})
    with pytest.raises(WeightsError, match=field):
        export_official(model, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_export_refuses_what_is_no_model(tiny: Veca, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear"):
        export_official(torch.nn.Linear(1, 1), tmp_path / "x.pt")  # type: ignore[arg-type]
    with torch.no_grad():
        tiny.norm.bias[0] = float("nan")
    with pytest.raises(WeightsError, match=r"final_norm\.bias"):
        export_official(tiny, tmp_path / "x.pt")


def test_sizes_of_ours_get_no_family_of_theirs() -> None:
    assert their_config(PRESETS["veca_tiny_patch16"])["model_family"] == "custom"
    assert their_config(preset("small").replace(num_cores=32))["model_family"] == "custom"


def test_provenance(small: tuple[Path, dict[str, Tensor], dict[str, Any]]) -> None:
    path, state, c = small
    checkpoint(path, state, c, global_step=7, epoch="x")
    record = official.provenance(official.read_checkpoint(path))
    assert record["teacher"] == "someone/teacher"
    assert record["budgets"] == [8, 16]
    assert record["global_step"] == 7
    assert "epoch" not in record
    assert record["source_file"] == "x.pt"
    assert len(record["source_sha256"]) == 64
