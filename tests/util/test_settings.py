"""One reader of settings: types, names, changes, and files that build on others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from veca._util.settings import SettingsReader, SettingsTables, Words, flat, to_table, to_toml
from veca.distill import load_config
from veca.errors import DistillError, ProbeError, VecaError
from veca.probe import load_protocol


@dataclass(frozen=True)
class Inner:
    lr: float = 1.0
    steps: int = 2
    pair: tuple[float, float] = (0.1, 0.2)

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise VecaError(f"inner.steps must be at least 0, got {self.steps}.")


@dataclass(frozen=True)
class Item:
    name: str
    on: bool = False


@dataclass(frozen=True)
class Outer:
    seed: int = 0
    note: str | None = None
    inner: Inner = field(default_factory=Inner)
    items: tuple[Item, ...] = ()
    by_size: dict[int, float] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


READER = SettingsReader(ProbeError, Words(form="wrong form {line!r}"))


def write(folder: Path, **files: str) -> Path:
    """Files NAME.toml; the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / f"{name}.toml"
        path.write_text(text)
    return path


def load(path: Path) -> Outer:
    return READER.build(Outer, READER.read(path))


def test_there_and_back() -> None:
    made = Outer(3, 'a "b"', Inner(2.0), (Item("x", True), Item("y")), {32: 0.5}, {"k": [1]})
    text = to_toml(to_table(made))
    assert READER.build(Outer, SettingsTables(READER.parse(text, "text"))) == made
    assert flat(to_table(made))["items.1.name"] == "y" and flat({}) == {}


def test_whole_numbers_become_numbers_and_nothing_else_is_turned() -> None:
    assert READER.build(Inner, SettingsTables({"lr": 2})) == Inner(2.0)
    for table in ({"steps": 2.0}, {"steps": True}, {"lr": True}, {"lr": float("nan")}):
        with pytest.raises(ProbeError, match=next(iter(table))):
            READER.build(Inner, SettingsTables(table))


class TestExtends:
    def test_tables_merge_and_lists_are_replaced(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            base='seed = 1\nnote = "b"\n[inner]\nlr = 5\npair = [1, 2]\n[[items]]\nname = "x"\n'
            "[by_size]\n32 = 1\n[free.deep]\na = 1\nb = 2\n",
            child='extends = "base.toml"\nseed = 2\nitems = [{name = "y"}]\n[inner]\nsteps = 7\n'
            "[by_size]\n48 = 2\n[free.deep]\nb = 3\n",
        )
        assert load(path) == Outer(
            2, "b", Inner(5.0, 7, (1.0, 2.0)), (Item("y"),), {32: 1.0, 48: 2.0},
            {"deep": {"a": 1, "b": 3}},
        )  # fmt: skip

    def test_chains_go_by_the_folder_of_each_file(self, tmp_path: Path, monkeypatch) -> None:
        write(tmp_path / "far" / "deep", root="seed = 1\n[inner]\nlr = 3\n")
        write(tmp_path / "far", middle='extends = "deep/root.toml"\nnote = "m"\n')
        path = write(tmp_path, top='extends = "far/middle.toml"\n[inner]\nsteps = 4\n')
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        assert load(path) == Outer(1, "m", Inner(3.0, 4))

    def test_one_base_twice_in_a_chain_is_a_cycle(self, tmp_path: Path) -> None:
        path = write(tmp_path, a='extends = "b.toml"', b='extends = "a.toml"')
        with pytest.raises(ProbeError, match=r"extends.*b\.toml -> a\.toml -> b\.toml") as caught:
            load(path)
        assert "\n" not in str(caught.value)
        with pytest.raises(ProbeError, match=r"extends.*self\.toml -> self\.toml"):
            load(write(tmp_path, self='extends = "self.toml"'))

    @pytest.mark.parametrize(
        ("base", "child", "words"),
        [
            ("[inner]\nlrr = 1", "[inner]\nlr = 1", r"base\.toml.*\[inner\].*'lrr'"),
            ("[inner]\nlr = 1", "[inner]\nlrr = 1", r"child\.toml.*\[inner\].*'lrr'"),
            ('seed = "1"', "", r"base\.toml.*seed"),
            ('seed = "1"', "seed = 2.5", r"child\.toml.*seed.*2\.5"),
            ('[[items]]\nname = "x"\non = 1', "", r"base\.toml.*items\.0\.on"),
            ("[[items]]\non = true", "", r"base\.toml.*items\.0.*'name'"),
            ("[inner]\nsteps = -1", "", r"base\.toml.*inner\.steps"),
            ("inner = 1", "[inner]\nlr = true", r"child\.toml.*inner\.lr"),
            ("a = = 1", "", r"base\.toml.*TOML"),
        ],
    )
    def test_the_file_of_a_mistake_is_named(self, tmp_path, base, child, words) -> None:
        path = write(tmp_path, base=base, child=f'extends = "base.toml"\n{child}')
        with pytest.raises(ProbeError, match=words):
            load(path)

    def test_a_base_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ProbeError, match=r"a\.toml.*'no\.toml'"):
            load(write(tmp_path, a='extends = "no.toml"'))
        with pytest.raises(ProbeError, match=r"a\.toml.*extends.* 1\b"):
            load(write(tmp_path, a="extends = 1"))

    def test_only_files_extend(self) -> None:
        with pytest.raises(ProbeError, match="'extends'"):
            READER.build(Outer, SettingsTables({"extends": "base.toml"}))


class TestChanges:
    def test_values_are_toml_or_bare_text(self) -> None:
        settings = SettingsTables({"items": [{"name": "x"}]})
        for line in ("inner.lr=1e-3", "note = plain text", "items.0.on=true", "by_size.32 = 2"):
            READER.change(settings, line)
        assert READER.build(Outer, settings) == Outer(
            0, "plain text", Inner(1e-3), (Item("x", True),), {32: 2.0}
        )

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("seed", "wrong form 'seed'"),
            ("inner..lr=1", r"wrong form 'inner\.\.lr=1'"),
            ("seed.x=1", "^seed"),
            ("items.3.name=y", r"items\.3"),
        ],
    )
    def test_what_cannot_be_changed(self, line: str, words: str) -> None:
        with pytest.raises(ProbeError, match=words):
            READER.change(SettingsTables({"seed": 1, "items": [{"name": "x"}]}), line)

    def test_no_file_is_blamed_for_a_change(self, tmp_path: Path) -> None:
        path = write(tmp_path, base="[inner]\nlr = 1", child='extends = "base.toml"')
        settings = READER.read(path)
        READER.change(settings, "inner.lr=fast")
        with pytest.raises(ProbeError, match=r"^--set inner\.lr"):
            READER.build(Outer, settings)


def test_recipes_and_protocols_extend_alike(tmp_path: Path) -> None:
    base = "[schedule]\nsteps = 5\nsize = 32\n[optimizer]\nlr = 1e-3\n"
    path = write(tmp_path, base=base, mine='extends = "base.toml"\n[optimizer]\nlr_min = 1e-4\n')
    config = load_config(path, overrides=["schedule.steps=6"])
    assert (config.schedule.steps, config.optimizer.lr, config.optimizer.lr_min) == (6, 1e-3, 1e-4)
    # What a run keeps stands alone.
    kept = write(tmp_path / "run", config=config.to_toml())
    assert "extends" not in kept.read_text() and load_config(kept) == config
    (tmp_path / "base.toml").write_text("[optimizer]\nlrr = 1")
    with pytest.raises(DistillError, match=r"base\.toml.*'lrr'"):
        load_config(path)

    whole = load_protocol("quick")
    write(tmp_path, quick=to_toml(whole.to_dict()))
    path = write(tmp_path, other='extends = "quick.toml"\nname = "other"\n[knn]\nk = [10]\n')
    found = load_protocol(path)
    assert found.name == "other" and found.knn is not None and found.knn.k == (10,)
    assert found.linear == whole.linear
