"""Outputs as other libraries have them: by name, by place, on one line, and DINO's tuples."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from conftest import SMALLEST, stirred
from veca import DenseVit, Veca, load
from veca.errors import InputError, VecaError

IMAGES = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))  # 3 x 4 patches
WIDER = SMALLEST.replace(output_width=40)


@pytest.fixture(scope="module")
def model() -> Veca:
    return stirred(Veca(WIDER)).eval()


@pytest.fixture(scope="module")
def dense() -> DenseVit:
    return DenseVit(WIDER).eval()


@pytest.fixture(scope="module", params=["model", "dense"])
def either(request) -> Veca | DenseVit:
    return request.getfixturevalue(request.param)


@torch.no_grad()
def test_parts_by_name_and_by_place(either) -> None:
    out = either(IMAGES)
    assert torch.equal(out["cls"], out.cls) and torch.equal(out["patches"], out.patches)
    assert torch.equal(out["feature_map"], out.feature_map())
    assert out["grid"] == out.grid == (3, 4)
    assert out[0] is next(iter(out)) and out[-1] == out.grid and out[:2] == tuple(out)[:2]
    assert set(dict(out)) == set(out.keys()) >= {"cls", "patches", "grid", "feature_map"}
    assert all(getattr(out, name) is out[name] for name in out._fields)
    assert "cls" in out and "cores_xy" not in out and (3, 4) in out[-1:]
    with pytest.raises(KeyError, match="'patches'") as caught:
        out["patch"]
    assert isinstance(caught.value, VecaError) and isinstance(caught.value, ValueError)
    assert not str(caught.value).startswith(("'", '"'))


@torch.no_grad()
def test_it_is_a_tuple_still(either) -> None:
    out = either(IMAGES)
    assert type(out)(*out) == type(out)._make(out) and len(out) == len(out._fields)
    leaves, spec = pytree.tree_flatten(out)
    assert type(pytree.tree_unflatten(leaves, spec)) is type(out)
    for again in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(again) is type(out) and torch.equal(again["cls"], out["cls"])


@torch.no_grad()
def test_a_repr_of_one_line(either) -> None:
    said = repr(either(IMAGES))
    assert "\n" not in said and len(said) < 100
    for fact in ("cls [2, 40]", "patches [2, 12, 40]", "3 x 4", "float32", "cpu"):
        assert fact in said
    large = torch.empty(16, 64, 1280, dtype=torch.bfloat16, device="meta")
    out = type(either(IMAGES))
    parts = {name: large for name in out._fields if name != "grid"}
    assert len(repr(out(**parts, grid=(128, 128)))) <= 115
    assert repr(out(*[None] * len(out._fields)))  # as tracers make them


def test_a_compiler_sees_through(model) -> None:
    def parts(images):
        out = model(images, cores=3)
        return out["cls"], out[1], out.cores, *out[2:3]

    compiled = torch.compile(parts, backend="eager", fullgraph=True)
    with torch.no_grad():
        for got, wanted in zip(compiled(IMAGES), parts(IMAGES), strict=True):
            torch.testing.assert_close(got, wanted)


def test_familiar_sizes(either) -> None:
    assert (either.num_features, either.embed_dim, either.patch_size) == (40, 32, 16)
    assert (either.device, either.dtype) == (torch.device("cpu"), torch.float32)


@torch.no_grad()
def test_forward_features_are_all_tokens(model, dense) -> None:
    out = model(IMAGES, cores=3)
    tokens = model.forward_features(IMAGES, cores=3)
    assert torch.equal(tokens[:, :3], out.cores) and torch.equal(tokens[:, 3:], out.patches)
    tokens, plain = dense.forward_features(IMAGES), dense(IMAGES)
    assert torch.equal(tokens[:, 0], plain.cls) and torch.equal(tokens[:, 5:], plain.patches)


# ------------------------------------------------------------------- DINO's get_intermediate_layers


def test_the_signature_is_dinos(either) -> None:
    found = inspect.signature(either.get_intermediate_layers).parameters
    names = ["x", "n", "reshape", "return_class_token", "return_extra_tokens", "norm"]
    assert list(found)[: len(names)] == names
    defaults = {name: found[name].default for name in names[1:]}
    assert defaults == {
        "n": 1, "reshape": False, "return_class_token": False, "return_extra_tokens": False,
        "norm": True,
    }  # fmt: skip


@torch.no_grad()
def test_the_last_layer_is_the_output(either) -> None:
    out = either(IMAGES)
    (last,) = either.get_intermediate_layers(IMAGES)
    assert torch.equal(last, out.patches)
    ((maps, cls),) = either.get_intermediate_layers(
        IMAGES, n=1, reshape=True, return_class_token=True
    )
    assert torch.equal(maps, out.feature_map()) and torch.equal(cls, out.cls)
    assert maps.is_contiguous()


@torch.no_grad()
def test_layers_by_number_and_in_order(either) -> None:
    both = either.get_intermediate_layers(IMAGES, 2)
    assert isinstance(both, tuple) and len(both) == 2
    for n in ([1, 2], [2, 1], (-2, -1), range(1, 3)):
        for found, wanted in zip(either.get_intermediate_layers(IMAGES, n), both, strict=True):
            assert torch.equal(found, wanted)
    (first,) = either.get_intermediate_layers(IMAGES, [1])
    assert torch.equal(first, both[0]) and not torch.equal(first, both[1])
    for bad in (0, 4, [3], [-4], [], 1.5, True, "0"):
        with pytest.raises(InputError, match="blocks"):
            either.get_intermediate_layers(IMAGES, bad)


@torch.no_grad()
def test_tokens_beside_the_patches(model, dense) -> None:
    def shapes(layers):
        return [tuple(tuple(part.shape) for part in layer) for layer in layers]

    beside = {"return_class_token": True, "return_extra_tokens": True}
    got = model.get_intermediate_layers(IMAGES, 2, cores=3, **beside)
    assert shapes(got) == [((2, 12, 40), (2, 40), (2, 2, 40))] * 2
    patches, cls, extra = got[-1]
    out = model(IMAGES, cores=3)
    assert torch.equal(patches, out.patches)
    assert torch.equal(torch.cat([cls[:, None], extra], dim=1), out.cores)
    got = model.get_intermediate_layers(IMAGES, cores=3, return_extra_tokens=True)
    assert shapes(got) == [((2, 12, 40), (2, 2, 40))]
    got = dense.get_intermediate_layers(IMAGES, **beside)
    assert shapes(got) == [((2, 12, 40), (2, 40), (2, 4, 40))]


@torch.no_grad()
def test_without_the_projection_and_without_the_norm(model, dense) -> None:
    raw = model.get_intermediate_layers(IMAGES, 3, norm=False)
    wanted = [out.patches for out in model.forward_intermediates(IMAGES, norm=False)]
    assert all(torch.equal(a, b) for a, b in zip(raw, wanted, strict=True))
    for either in (model, dense):
        (native,) = either.get_intermediate_layers(IMAGES, projection=False)
        assert torch.equal(native, either.tokens(IMAGES).patches) and native.shape[2] == 32
        (bare,) = either.get_intermediate_layers(IMAGES, norm=False, projection=False)
        torch.testing.assert_close(either.norm(bare), native)


@pytest.mark.parametrize("name", ["tiny"])
def test_the_front_door(name: str) -> None:
    model = load(name)
    assert (model.num_features, model.embed_dim) == (1280, 192)
