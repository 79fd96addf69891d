"""The engine is the model: same outputs at every size and budget, whatever was prepared."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from conftest import SMALLEST, stirred
from veca import compile_for_inference, create_model, load
from veca.errors import InputError


@pytest.mark.parametrize("output_width", [None, 20])
def test_same_outputs_as_the_model(output_width):
    model = stirred(create_model(SMALLEST, output_width=output_width)).eval()
    engine = compile_for_inference(model, cache=2)
    for size, cores, batch in (((48, 64), 8, 2), ((32, 80), 1, 1), ((48, 64), 5, 3)):
        images = torch.randn(batch, 3, *size)
        with torch.no_grad():
            expected = model(images, cores=cores)
        got = engine(images, cores=cores)
        assert got.grid == expected.grid
        for name in ("cores", "patches", "core_xy", "cls"):
            torch.testing.assert_close(
                getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5
            )


def test_compiled_blocks_give_the_same(tiny):
    engine = compile_for_inference(tiny, compile=False)
    engine._block = torch.compile(engine._block, backend="aot_eager", fullgraph=True, dynamic=False)
    images = torch.randn(2, 3, 48, 64)
    with torch.no_grad():
        expected = tiny(images, cores=4).patches
    torch.testing.assert_close(engine(images, cores=4).patches, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_more_shapes_than_torch_compiles_by_default(tiny, monkeypatch):
    import torch._dynamo

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # in a moment
    # Not monkeypatch: undoing that hides the setting from every compilation that follows.
    with torch._dynamo.config.patch(recompile_limit=1):
        engine = compile_for_inference(tiny, compile=True)
        for side in (32, 48, 64):
            images = torch.randn(1, 3, side, 32)
            expected = tiny(images).patches
            torch.testing.assert_close(engine(images).patches, expected, rtol=1e-4, atol=1e-4)


def test_making_an_engine_draws_no_random_numbers(tiny):
    before = torch.get_rng_state()
    compile_for_inference(tiny, size=32)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_last_shapes_stay_prepared(tiny):
    engine = compile_for_inference(tiny, size=32, cores=[2, 4], cache=2)

    def shapes():
        return [key[:3] for key in engine._prepared]

    assert shapes() == [(1, (2, 2), 2), (1, (2, 2), 4)]
    engine.prepare(1, (32, 48), 2)
    assert shapes() == [(1, (2, 2), 4), (1, (2, 3), 2)]
    engine.prepare(1, 32, 4)
    assert shapes() == [(1, (2, 3), 2), (1, (2, 2), 4)]


def test_an_engine_says_what_it_is():
    engine = compile_for_inference(load("tiny"), dtype=torch.bfloat16)
    assert engine.name == "veca_tiny_patch16"
    assert (engine.device, engine.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert (engine.num_features, engine.embed_dim, engine.patch_size) == (1280, 192, 16)
    facts = '"veca_tiny_patch16", 12 layers, width 192, 64 cores, patch 16, cpu bfloat16'
    assert repr(engine) == f"InferenceEngine({facts})"


def test_later_changes_of_the_model_do_not_reach_the_engine(tiny):
    engine = compile_for_inference(tiny)
    images = torch.randn(1, 3, 32, 32)
    before = engine(images).patches
    stirred(tiny)
    assert torch.equal(engine(images).patches, before)


class Adapted(torch.nn.Module):
    """A layer with something added, whose weights look like the layer's own."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 1.0


def test_hooks_and_missing_layers_are_refused(tiny):
    hook = tiny.blocks[1].ffn.up.register_forward_hook(lambda layer, given, out: out + 1.0)
    with pytest.raises(InputError, match=r"blocks\.1\.ffn\.up .* hooks"):
        compile_for_inference(tiny)
    hook.remove()
    compile_for_inference(tiny)
    del tiny.moves[0]
    with pytest.raises(InputError, match=r"moves\.1"):
        compile_for_inference(tiny)


@pytest.mark.parametrize("name", ["attn.q", "ffn.down", "project", "nothing"])
def test_layers_that_do_more_than_their_weights_are_refused(name):
    """Packed without a word they would do less."""
    model = stirred(create_model(SMALLEST, output_width=20)).eval()
    if name == "nothing":
        torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attn.v)  # its weight is right
        images = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            expected = model(images).patches
        torch.testing.assert_close(compile_for_inference(model)(images).patches, expected)
        return
    name = name if name == "project" else f"blocks.1.{name}"
    model.set_submodule(name, Adapted(model.get_submodule(name)))
    with pytest.raises(InputError, match=f"{name} .*Adapted"):
        compile_for_inference(model)


def test_bad_requests_are_named(tiny):
    engine = compile_for_inference(tiny, check_pixels=True)
    with pytest.raises(InputError, match="cores"):
        engine(torch.randn(1, 3, 32, 32), cores=9)
    with pytest.raises(InputError, match="32 x 33"):
        engine(torch.randn(1, 3, 32, 33))
    with pytest.raises(InputError, match="NaN"):
        engine(torch.full((1, 3, 32, 32), float("nan")))
    with pytest.raises(InputError, match="graphs"):
        compile_for_inference(tiny, graphs=True)
    with pytest.raises(InputError, match="Linear"):
        compile_for_inference(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="cache"):
        compile_for_inference(tiny, cache=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_on_cuda_give_the_models_outputs():
    model = stirred(create_model("tiny"), 0.01).cuda().eval()
    engine = compile_for_inference(model, size=256, cores=[8, 64], batch=2)
    for cores in (8, 64, 8):
        images = torch.randn(2, 3, 256, 256, device="cuda")
        with torch.no_grad():
            expected = model(images, cores=cores)
        got = engine(images, cores=cores)
        error = (got.patches.float() - expected.patches).norm() / expected.patches.norm()
        assert error < 2e-2
        assert (got.core_xy - expected.core_xy).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("keep", [0.5, 0.22])
def test_graphs_on_cuda_merge_as_the_model_does(keep):
    """Compiled, a step of merging indexed what it should not; eagerly it never did."""
    model = stirred(create_model(SMALLEST)).cuda().eval()
    engine = compile_for_inference(model, dtype=torch.float32)
    for _ in range(2):  # recorded, then replayed
        images = torch.randn(3, 3, 80, 112, device="cuda")  # 5 x 7 patches: an odd row and column
        with torch.no_grad():
            expected = model(images, keep=keep)
        torch.testing.assert_close(engine(images, keep=keep), expected, rtol=2e-3, atol=2e-3)
