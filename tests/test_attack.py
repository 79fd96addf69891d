"""The attack finds what it looks for, and a small seeded part of it holds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attack import campaign, damage, readers
from attack.__main__ import main
from attack.campaign import Case, Tally
from attack.files import TARGETS, Files
from attack.images import Images
from attack.pictures import pictures
from attack.registry import ATTACKS
from attack.sandbox import FAILURES, Result, Sandbox, digest, judged
from attack.scenes import differences
from veca.errors import InputError
from veca.images.formats import FORMATS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits of /proc")


def raising(error: BaseException):
    def read() -> object:
        raise error

    return read


class TestJudging:
    def test_what_a_reader_does(self):
        assert judged(lambda: 1, 1, covered=True).outcome == "accepted"
        assert judged(lambda: 2, 1, covered=False).outcome == "changed"
        assert judged(lambda: 2, 1, covered=True).outcome == "silent"
        assert judged(raising(InputError("x")), 1, covered=True).outcome == "refused"
        assert judged(raising(KeyError("x")), 1, covered=False).outcome == "foreign"

    @pytest.mark.parametrize(
        ("case", "outcome"),
        [
            (lambda number: time.sleep(60), "hang"),
            (lambda number: os.kill(os.getpid(), 9), "died"),
            (lambda number: os._exit(3), "died"),
            (lambda number: Result("accepted", (b"x" * (900 * 2**20))[:0].decode()), "over memory"),
            (lambda number: int("x"), "foreign"),
            (lambda number: Result("refused", "why"), "refused"),
        ],
    )
    def test_the_sandbox_sees_it_and_goes_on(self, case, outcome):
        def one(number: int) -> Result:
            return case(number) if number == 1 else Result("accepted")

        # What a fork takes along: pages of libraries, which are files, it reads anew.
        resident, files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        here = (resident - files) * os.sysconf("SC_PAGE_SIZE")
        with Sandbox(one, seconds=0.5, memory=here + 300 * 2**20) as sandbox:
            outcomes = [sandbox.run(number).outcome for number in range(3)]
        assert outcomes == ["accepted", outcome, "accepted"]
        assert (outcome in FAILURES) == (outcome != "refused")

    def test_a_digest_is_of_the_content(self):
        assert digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}) != digest({"a": [1, 2]})


class TestMutants:
    def test_they_follow_the_seed(self):
        case = Case("png-rgb/read", 3, 26)
        again = Case.parse(str(case))
        assert again == case and again.file == "png-rgb" and again.way == "read"
        data = pictures()["png-rgb"]
        made = [
            damage.mutate(data, damage.image_damage("png-rgb"), Case("png-rgb", n, 26).rng).data
            for n in (3, 3, 4)
        ]
        assert made[0] == made[1] != made[2] and data not in made

    def test_all_damage_is_done_to_all_kinds(self):
        for name, data in {**pictures(), "json": b'{"a": [1, {"b": 2}]}', "one": b"x"}.items():
            every = {*damage.image_damage(name), *damage.JSON, *damage.SAFETENSORS, *damage.ZIP}
            for one in every:
                for number in range(3):
                    assert isinstance(one(data, random.Random(number)), bytes)

    def test_every_format_is_attacked(self):
        kinds = {name.partition("-")[0] for name in pictures()}
        assert {name.lower() for name in FORMATS} <= kinds


class Prepared:
    """One target whose reader fails at the third case."""

    def run(self, case: Case) -> Result:
        return Result("foreign", "Boom") if case.number == 2 else Result("refused")

    def mutant(self, case: Case) -> tuple[bytes, str]:
        return b"damaged", "boom"

    def costs(self, case: Case) -> int:
        return 0

    def whole(self, case: Case) -> bytes:
        return b""

    def read(self, case: Case, data: bytes) -> Result:
        return Result("accepted")


def test_a_campaign_counts_keeps_and_goes_on(tmp_path):
    file, said = tmp_path / "t.json", []
    facts = {"seed": 1}
    tally = Tally(file, facts)
    over = time.monotonic()
    assert not campaign.attack(Prepared(), {"x": 9}, tally, seed=1, until=over, say=said.append)
    tally = Tally(file, facts)
    kept = tmp_path / "kept"
    assert campaign.attack(Prepared(), {"x": 5}, tally, seed=1, keep_in=kept, say=said.append)
    tally = Tally(file, facts)
    assert campaign.attack(Prepared(), {"x": 6}, tally, seed=1, say=said.append)
    (row,) = tally.rows()
    assert row["cases"] == 6 and row["refused"] == 5 and row["foreign"] == 1
    assert len(tally.failed) == 1 and "x:1:2" in said[-1] and "Boom" in said[-1]
    assert next(path for path in kept.iterdir() if path.suffix != ".txt").read_bytes() == b"damaged"
    assert Tally(file, {"seed": 2}).done["x"] == 0


def test_a_reader_that_refuses_the_whole_file_is_told(tmp_path):
    class Broken(Prepared):
        def read(self, case: Case, data: bytes) -> Result:
            return Result("refused", "all of it")

    with pytest.raises(RuntimeError):
        campaign.attack(Broken(), {"x": 1}, Tally(None, {}), seed=1)


def test_differences_are_told():
    assert differences({"a": 1}, {"a": 1}) == ""
    told = differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4})
    assert told == "missing: c; left over: d; not the same: b"


@pytest.mark.parametrize("name", readers.READERS)
def test_the_corpus_and_mutants_of_it_are_read_or_refused(name):
    found = sorted((readers.CORPUS / name).iterdir())
    assert found and sum(path.stat().st_size for path in found) < 10_000
    for path in found:
        readers.try_one(name, path.read_bytes())
        for number in range(15):
            made = damage.mutate(path.read_bytes(), damage.JSON, Case(name, number, 1).rng)
            readers.try_one(name, made.data)


def held(prepared, targets, count, tmp_path) -> None:
    tally = Tally(None, {})
    assert campaign.attack(
        prepared, dict.fromkeys(targets, count), tally, seed=26, keep_in=tmp_path / "kept"
    )
    assert tally.failed == []


@pytest.mark.slow
def test_some_damaged_images(tmp_path):
    prepared = Images(tmp_path)
    targets = ["jpeg-baseline", "png-palette", "gif", "bmp-24-bit", "tiff-lzw", "webp-lossy"]
    held(prepared, [f"{name}/read" for name in targets], 8, tmp_path)
    held(prepared, [f"png-rgb/{way}" for way in ("features", "pack", "demo")], 2, tmp_path)


LIGHT = ("weights", "settings", "labels", "memory", "cache", "packed", "tuning", "pass")


@pytest.mark.slow
def test_some_damaged_files(tmp_path):
    names = [name for name, target in TARGETS.items() if target.maker in LIGHT]
    assert len(names) > 20
    held(Files(tmp_path, names), names, 3, tmp_path)


@pytest.mark.slow
def test_some_kills(tmp_path):
    from attack.kills import Kills

    for name in ("pack", "large"):
        report = Kills(tmp_path, name).run(random.Random(26), most=2)
        assert report.fault == ""


@pytest.mark.slow
def test_some_requests(tmp_path):
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from attack.requests import checked, demo

    with demo(tmp_path) as page:
        rows = [checked(page, what, 26, 10) for what in ("names", "files", "sizes", "events")]
    assert [row["detail"] for row in rows] == [""] * 4
    assert sum(row["refused"] for row in rows) > 60


def test_the_list_names_every_attack(capsys):
    assert main(["--list"]) == 0
    told = capsys.readouterr().out
    modules = {p.stem for p in (ROOT / "attack").glob("*.py") if "\ndef run(" in p.read_text()}
    assert modules == set(ATTACKS) and all(name in told for name in ATTACKS)
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_the_list_needs_nothing_heavy():
    code = "import sys, attack.__main__ as a; a.main(['--list']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
