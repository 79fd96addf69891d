"""Which optimiser moves what, the bank's rows, states that go by name, averaged weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import SMALLEST
from distill.small import settings
from veca import create_model
from veca.distill import DistillError, distill
from veca.distill.optim import NAMES, Optimizers, RowAdamW, Split, WeightAverage
from veca.distill.parallel import shard
from veca.distill.student import Student


def make_student() -> Student:
    return Student(create_model(SMALLEST, output_width=20), [(20, 20), (12, 8)])


def test_the_published_split() -> None:
    split = Split(make_student())
    block = "backbone.blocks.{}.{}.weight"
    wanted = {
        block.format(i, part)
        for i in range(3)
        for part in ("attn.q", "attn.k", "attn.v", "attn.out", "ffn.up", "ffn.down")
    }
    wanted -= {block.format(2, "ffn.down")}
    wanted |= {"backbone.project.weight", "heads.1.cls.weight", "heads.1.dense.weight"}
    assert set(split.matrix) == wanted
    assert set(split.bank) == {"backbone.bank.tokens", "backbone.bank.coordinates"}
    assert "backbone.moves.0.head.weight" in split.rest
    assert "backbone.moves.1.alpha" in split.rest
    assert "backbone.patch_embed.weight" in split.rest


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_moved_by_one_optimiser(name: str) -> None:
    student = make_student()
    optimizers = Optimizers(student, name=name, lr=0.1)
    owned = [id(p) for m in optimizers.members for g in m.param_groups for p in g["params"]]
    assert sorted(owned) == sorted(id(p) for p in student.parameters())
    before = [p.detach().clone() for p in student.parameters()]
    for p in student.parameters():
        p.grad = torch.randn_like(p)
    optimizers.step()
    optimizers.zero_grad()
    assert all(bool((a != b).any()) for a, b in zip(before, student.parameters(), strict=True))
    assert all(p.grad is None for p in student.parameters())


def test_lr_is_the_same_for_all() -> None:
    optimizers = Optimizers(make_student())
    optimizers.set_lr(0.25)
    assert {g["lr"] for m in optimizers.members for g in m.param_groups} == {0.25}


def test_adamw_at_a_rate_of_its_own() -> None:
    optimizers = Optimizers(make_student())
    optimizers.set_lr(0.5, adamw_scale=0.25)
    rates = {type(m).__name__: {g["lr"] for g in m.param_groups} for m in optimizers.members}
    assert rates == {"NorMuon": {0.5}, "RowAdamW": {0.125}, "AdamW": {0.125}}
    plain = Optimizers(make_student(), name="adamw")
    plain.set_lr(0.5, adamw_scale=0.25)
    assert {g["lr"] for m in plain.members for g in m.param_groups} == {0.125}


def test_unknown_name() -> None:
    with pytest.raises(DistillError, match="'sgd'"):
        Optimizers(make_student(), name="sgd")


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_rows_with_gradients_move_as_adamw_moves_them(size: float) -> None:
    options = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.9, 0.99), "eps": 1e-8}
    start = torch.randn(4, 3)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine, reference = RowAdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        ours.grad = torch.randn(4, 3) * size
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_row_outside_the_prefix_rests() -> None:
    """Steps without a gradient leave no trace: the row goes on as if they had not been."""
    options = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.9, 0.99), "eps": 1e-8}
    start = torch.randn(4, 3)
    ours, short = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine, other = RowAdamW([ours], **options), RowAdamW([short], **options)
    for step in range(6):
        grad = torch.randn(4, 3)
        if step % 2:
            grad[2:] = 0  # a small budget
        before = ours.detach().clone()
        ours.grad = grad
        mine.step()
        if step % 2:
            assert torch.equal(ours[2:], before[2:])
            assert not torch.equal(ours[:2], before[:2])
        else:
            short.grad = grad.clone()
            other.step()
    assert torch.allclose(ours[2:], short[2:])


@pytest.mark.parametrize("name", NAMES)
def test_states_go_by_name_and_come_back(name: str) -> None:
    torch.manual_seed(0)
    first, second = make_student(), make_student()
    second.load_state_dict(first.state_dict())
    a = Optimizers(first, name=name, lr=0.1)
    for _ in range(2):
        for p in first.parameters():
            p.grad = torch.randn_like(p)
        a.step()
    second.load_state_dict(first.state_dict())
    b = Optimizers(second, name=name, lr=0.1)
    stored = {key: value.clone() for key, value in a.state_tensors().items()}
    assert all("/" in key and key.rpartition("/")[0] in a.parameters for key in stored)
    b.load_state_tensors(stored, shard)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    a.step()
    b.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_states_of_another_model_are_refused() -> None:
    with pytest.raises(DistillError, match=r"\(nothing\)"):
        Optimizers(make_student()).load_state_tensors({"nothing/step": torch.zeros(1)}, shard)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_reaches_its_optimiser(name: str) -> None:
    both = {"lr": 0.3, "weight_decay": 0.4}
    adam = {"betas": (0.5, 0.6), "eps": 1e-5}
    matrix = {"mu": 0.8, "beta2": 0.7, "nesterov": False, "cautious": False}
    muon = {"momentum": 0.8, "nesterov": False}
    wanted = {"NorMuon": matrix, "Muon": muon, "RowAdamW": adam, "AdamW": adam}
    for member in Optimizers(make_student(), name=name, **both, **adam, **matrix).members:
        for group in member.param_groups:
            assert {**both, **wanted[type(member).__name__]}.items() <= group.items()


def test_every_setting_of_the_optimiser_is_passed_on(tmp_path, monkeypatch) -> None:
    asked = {
        "lr": 3e-3, "weight_decay": 0.2, "mu": 0.8, "beta2": 0.7, "nesterov": False,
        "cautious": False, "betas": [0.5, 0.6], "eps": 1e-5,
    }  # fmt: skip
    seen = []

    def note(module, **options):
        seen.append(options)
        return Optimizers(module, **options)

    monkeypatch.setattr("veca.distill.trainer.Optimizers", note)
    distill(settings(schedule={"steps": 1, "warmup": 0}, optimizer=asked), tmp_path)
    assert seen == [{**asked, "name": "normuon", "betas": (0.5, 0.6)}]


def test_average_by_its_definition() -> None:
    module = nn.Linear(3, 2)
    average = WeightAverage(module, 0.9)
    wanted = module.weight.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            module.weight.add_(torch.randn_like(module.weight))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * module.weight.detach()
    assert torch.allclose(average.tensors["weight"], wanted, atol=1e-5)
    now = module.weight.detach().clone()
    with average.applied():
        assert torch.allclose(module.weight, wanted, atol=1e-5)
    assert torch.equal(module.weight, now)


def test_the_average_counts_the_steps_done(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(WeightAverage, "update", lambda self, step: seen.append(step))
    distill(settings(ema=0.8, schedule={"steps": 4}), tmp_path)
    assert seen == [1, 2, 3, 4]
