import pytest
import torch
from torch import nn
from torch.nn import functional as F

from veca.errors import VecaError
from veca.teachers import CallableTeacher, TeacherError, load_teacher


def grey(images):
    """Four channels per 8 x 8 cell: mean, and the mean of each colour."""
    colours = F.avg_pool2d(images, 8)
    return torch.cat([colours.mean(dim=1, keepdim=True), colours], dim=1)


def teacher(**options):
    return CallableTeacher(grey, **{"width": 4, "stride": 8, "name": "grey", **options})


def test_features_at_the_size_that_falls_on_the_grid():
    pixels = torch.rand(2, 3, 16, 24)
    out = teacher().features(pixels, (2, 3))
    assert out.grid == (2, 3) and out.cls.dtype == out.patches.dtype == torch.float32
    cell = pixels[1, :, 8:16, 16:24]  # row 1, column 2: number 5 in row order
    expected = torch.stack([cell.mean(), *cell.mean(dim=(1, 2))])
    torch.testing.assert_close(out.patches[1, 5], expected)
    torch.testing.assert_close(out.feature_map()[1, :, 1, 2], expected)
    torch.testing.assert_close(out.cls[1, 0], pixels[1].mean())
    torch.testing.assert_close(teacher()(pixels, (2, 3)).patches, out.patches)


def test_pixels_of_another_size_are_resized_then_normalised():
    seen = []

    def spy(images):
        seen.append(images)
        return grey(images)

    mean, std = (0.5, 0.4, 0.3), (0.25, 0.5, 0.75)
    t = CallableTeacher(spy, width=4, stride=8, image_mean=mean, image_std=std)
    pixels = torch.rand(1, 3, 33, 20)
    t.features(pixels, (3, 2))
    resized = F.interpolate(pixels, (24, 16), mode="bicubic", antialias=True).clamp(0, 1)
    for channel in range(3):
        expected = (resized[:, channel] - mean[channel]) / std[channel]
        torch.testing.assert_close(seen[0][:, channel], expected)
    # Bytes mean the same image.
    levels = (pixels * 255).round().to(torch.uint8)
    t.features(levels, (3, 2))
    t.features(levels.float() / 255, (3, 2))
    torch.testing.assert_close(seen[1], seen[2])


def test_overshoot_of_resizing_is_cut_off():
    edge = torch.zeros(1, 3, 8, 8)
    edge[..., 4:] = 1
    out = CallableTeacher(lambda x: x, width=3, stride=1).features(edge, (32, 32))
    assert out.patches.min() == 0 and out.patches.max() == 1


def test_input_size_and_grid_for_a_size():
    patch14 = teacher(stride=14)
    assert patch14.input_size((16, 12)) == (224, 168)
    assert patch14.grid_for(512) == (37, 37) and patch14.input_size((37, 37)) == (518, 518)
    assert teacher(stride=16).grid_for((512, 384)) == (32, 24)
    assert teacher(stride=32).grid_for(40) == (1, 1)
    assert teacher(stride=32).grid_for(48) == (2, 2)
    assert teacher(sizes=[(64, 64), (96, 64)]).grid_for((100, 60)) == (12, 8)


def test_a_fixed_size_serves_its_own_grid_and_coarser_ones():
    fixed = teacher(sizes=[(64, 48)])
    pixels = torch.rand(1, 3, 64, 48)
    assert fixed.input_size((8, 6)) == (64, 48)
    assert fixed.input_size((4, 3)) == (64, 48)
    fine, coarse = fixed.features(pixels, (8, 6)), fixed.features(pixels, (4, 3))
    assert coarse.grid == (4, 3)
    # Cell (1, 2) of the coarse grid is made of rows 2..3 and columns 4..5 of the fine one.
    block = fine.patches.unflatten(1, (8, 6))[:, 2:4, 4:6].mean(dim=(1, 2))
    torch.testing.assert_close(coarse.patches.unflatten(1, (4, 3))[:, 1, 2], block)
    torch.testing.assert_close(coarse.cls, fine.cls)


def test_the_size_closest_to_the_grid_is_taken():
    assert teacher(sizes=[(64, 64), (32, 32)]).input_size((4, 4)) == (32, 32)


def test_a_grid_that_cannot_match_is_refused_with_those_that_can():
    fixed = teacher(sizes=[(64, 48)])
    for grid in ((16, 12), (6, 8), (8, 3), (3, 2)):
        with pytest.raises(TeacherError, match="8 x 6, 4 x 3") as error:
            fixed.features(torch.rand(1, 3, 64, 48), grid)
        assert "128 x 96, 64 x 48" in str(error.value)
    assert isinstance(error.value, VecaError) and isinstance(error.value, ValueError)


@pytest.mark.parametrize("grid", [(0, 1), (2,), 4, (2.0, 2), (True, 1), (1, 2, 3), "22"])
def test_bad_grids(grid):
    with pytest.raises(TeacherError, match="grid"):
        teacher().features(torch.rand(1, 3, 8, 8), grid)


@pytest.mark.parametrize(
    ("pixels", "noun"),
    [
        (torch.rand(3, 8, 8), r"\(3, 8, 8\)"),
        (torch.rand(1, 4, 8, 8), r"\(1, 4, 8, 8\)"),
        (torch.rand(0, 3, 8, 8), r"\(0, 3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.long), "int64"),
        (torch.rand(1, 3, 8, 8) * 255, "255"),
        (torch.full((1, 3, 8, 8), -2.0), "-2"),
        (torch.full((1, 3, 8, 8), float("nan")), "nan"),
        ([[0.5]], "list"),
    ],
)
def test_bad_pixels(pixels, noun):
    with pytest.raises(TeacherError, match=noun):
        teacher().features(pixels, (1, 1))


@pytest.mark.parametrize(
    ("output", "noun"),
    [
        (lambda x: (torch.zeros(1, 5), torch.zeros(1, 1, 4)), r"\(1, 5\)"),
        (lambda x: (torch.zeros(1, 4), torch.zeros(1, 2, 4)), r"\(1, 2, 4\)"),
        (lambda x: (torch.zeros(1, 4), None), "tuple"),
        (lambda x: "features", r"\bstr\b"),
        (lambda x: {"cls": torch.zeros(1, 4)}, "dict"),
    ],
)
def test_a_function_that_gives_something_else(output, noun):
    with pytest.raises(TeacherError, match=noun):
        CallableTeacher(output, width=4, stride=8).features(torch.rand(1, 3, 8, 8), (1, 1))


def test_what_a_function_may_return():
    pixels = torch.rand(2, 3, 16, 16)
    cls, square = torch.rand(2, 3), torch.rand(2, 5, 2, 2)
    tokens = square.flatten(2).transpose(1, 2)

    class Output:
        pass

    Output.cls, Output.patches = cls, tokens
    for output in (
        (cls, tokens),
        [cls, square],
        {"cls": cls, "patches": square, "more": 1},
        Output,
    ):
        t = CallableTeacher(lambda x, o=output: o, width=3, dense_width=5, stride=8)
        out = t.features(pixels, (2, 2))
        assert torch.equal(out.cls, cls) and torch.equal(out.patches, tokens)
    alone = CallableTeacher(lambda x: square, width=5, stride=8).features(pixels, (2, 2))
    torch.testing.assert_close(alone.cls, square.mean(dim=(2, 3)))


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"width": 0}, "width"),
        ({"stride": 1.5}, "stride"),
        ({"image_std": (1, 0, 1)}, "image_std"),
        ({"image_mean": (1, 2)}, "image_mean"),
        ({"sizes": []}, "sizes.*none"),
        ({"sizes": [(60, 64)]}, "60 x 64"),
        ({"fn": 3}, "function"),
    ],
)
def test_bad_descriptions(options, noun):
    with pytest.raises(TeacherError, match=noun):
        CallableTeacher(**{"fn": grey, "width": 4, "stride": 8, **options})


class Net(nn.Module):
    """Convolution, batch norm, dropout: everything that differs in training mode."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 8, stride=8)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("frequency", torch.tensor(1 / 3))

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x)))
        return x + self.frequency.to(x.dtype)


def test_frozen_even_inside_a_module_that_trains():
    net = Net()
    t = CallableTeacher(net, width=6, stride=8)
    assert not any(parameter.requires_grad for parameter in t.parameters())
    parent = nn.ModuleList([t, nn.Linear(2, 2)])
    pixels = torch.rand(4, 3, 16, 16)
    before = t.features(pixels, (2, 2))
    running = net.norm.running_mean.clone()
    parent.train()
    assert parent.training and not any(module.training for module in t.modules())
    after = t.train().features(pixels, (2, 2))
    assert torch.equal(before.patches, after.patches) and torch.equal(before.cls, after.cls)
    assert torch.equal(net.norm.running_mean, running)


def test_features_are_constants_that_a_loss_can_use():
    t = CallableTeacher(Net(), width=6, stride=8)
    out = t.features(torch.rand(2, 3, 16, 16, requires_grad=True), (2, 2))
    assert not out.patches.requires_grad
    student = torch.zeros_like(out.patches, requires_grad=True)
    (student * out.patches).sum().backward()  # saves the features for the backward pass
    assert torch.equal(student.grad, out.patches)


def test_dtype_of_weights_norms_and_buffers():
    net = Net()
    t = CallableTeacher(net, width=6, stride=8)
    pixels = torch.rand(2, 3, 16, 16)
    exact = t.features(pixels, (2, 2))
    for change in (t.bfloat16, lambda: t.to(torch.bfloat16), lambda: t.to("cpu", torch.bfloat16)):
        t.float()
        assert change() is t and t.dtype == net.conv.weight.dtype == torch.bfloat16
    assert net.norm.weight.dtype == net.frequency.dtype == torch.float32
    rough = t.features(pixels, (2, 2))
    assert rough.patches.dtype == torch.float32 and not torch.equal(rough.patches, exact.patches)
    torch.testing.assert_close(rough.patches, exact.patches, atol=0.05, rtol=0.05)
    with pytest.raises(TeacherError, match="int8"):
        t.to(torch.int8)


def test_a_callers_autocast_does_not_reach_it_but_its_own_does():
    t = CallableTeacher(Net(), width=6, stride=8)
    pixels = torch.rand(2, 3, 16, 16)
    alone = t.features(pixels, (2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(t.features(pixels, (2, 2)).patches, alone.patches)
    assert t.autocast(torch.bfloat16) is t and t.dtype == torch.bfloat16
    assert t.weight_dtype == torch.float32
    rough = t.features(pixels, (2, 2)).patches
    assert not torch.equal(rough, alone.patches)
    torch.testing.assert_close(rough, alone.patches, atol=0.05, rtol=0.05)
    assert torch.equal(t.autocast(None).features(pixels, (2, 2)).patches, alone.patches)


def test_compile_is_used_and_undone():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    t = CallableTeacher(Net(), width=6, stride=8)
    pixels = torch.rand(2, 3, 16, 16)
    before = t.features(pixels, (2, 2))
    t.compile(backend=backend)
    assert torch.equal(t.features(pixels, (2, 2)).patches, before.patches) and calls
    t.uncompile()
    calls.clear()
    t.features(pixels, (3, 3))
    assert not calls


def test_a_failing_compiler_falls_back_with_a_warning():
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    t = CallableTeacher(Net(), width=6, stride=8)
    pixels = torch.rand(2, 3, 16, 16)
    before = t.features(pixels, (2, 2))
    t.compile(backend=broken)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        after = t.features(pixels, (2, 2))
    assert torch.equal(after.patches, before.patches)
    t.features(pixels, (2, 2))  # and no second warning


def test_an_error_of_the_model_is_not_blamed_on_the_compiler():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    t = CallableTeacher(Failing(), width=6, stride=8)
    t.compile(backend="eager")
    with pytest.raises(KeyError, match="mine"):
        t.features(torch.rand(1, 3, 8, 8), (1, 1))


def test_patch_embedding_in_a_students_normalisation():
    class Patches(CallableTeacher):
        def _patch_convolution(self):
            return self.fn.weight, self.fn.bias

    conv = nn.Conv2d(3, 5, 4, stride=4)
    own = {"image_mean": (0.5, 0.4, 0.3), "image_std": (0.2, 0.3, 0.4)}
    t = Patches(conv, width=5, stride=4, **own)
    plain_weight, plain_bias = t.patch_embedding()
    assert torch.equal(plain_weight, conv.weight) and torch.equal(plain_bias, conv.bias)
    mean, std = (0.1, 0.2, 0.7), (0.9, 0.8, 0.6)
    weight, bias = t.patch_embedding(mean, std)
    pixels = torch.rand(2, 3, 8, 8)
    theirs = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    tokens = F.conv2d(theirs, weight, bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tokens, t.features(pixels, (2, 2)).patches, atol=1e-5, rtol=1e-5)
    assert teacher().patch_embedding() is None and teacher().classify(torch.zeros(1, 4)) is None


def test_describe_is_plain_and_names_the_weights():
    net = Net()
    t = CallableTeacher(net, width=6, stride=8, name="mine", licence="CC0-1.0")
    first = t.describe()
    assert (first["name"], first["licence"], first["width"], first["stride"]) == (
        "mine",
        "CC0-1.0",
        6,
        8,
    )
    assert first["parameters"] == sum(p.numel() for p in net.parameters())
    assert len(first["weights_sha256"]) == 64 and t.describe() == first
    with torch.no_grad():
        net.conv.weight[0, 0, 0, 0] += 1
    assert t.describe()["weights_sha256"] != first["weights_sha256"]
    assert teacher().describe()["weights_sha256"] is None


def test_a_teacher_in_memory_stays_as_it_is():
    t = CallableTeacher(Net(), width=6, stride=8).bfloat16()
    assert load_teacher(t) is t and t.dtype == torch.bfloat16
    assert load_teacher(t, dtype=torch.float32).dtype == torch.float32
