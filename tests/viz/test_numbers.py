"""Numbers against plain cases, and verdicts that follow from them."""

from __future__ import annotations

import math

import pytest
import torch

from veca import viz
from veca.errors import InputError
from veca.viz import numbers
from veca.viz.numbers import Numbers, attention_numbers, state_numbers


def test_looking_everywhere_alike():
    maps = torch.full((3, 8, 8), 1 / 64)
    coverage, radius, roundness, overlap = attention_numbers(maps)
    assert coverage == pytest.approx(1) and overlap == pytest.approx(1)
    assert roundness == pytest.approx(1)
    # Centres of 8 cells in [-1, 1] have variance (1 - 1/64) / 3 on each axis.
    assert radius == pytest.approx(math.sqrt(2 * (1 - 1 / 64) / 3))


def test_looking_at_one_patch_each():
    maps = torch.zeros(2, 4, 4)
    maps[0, 0, 0] = maps[1, 3, 2] = 1
    coverage, radius, _, overlap = attention_numbers(maps)
    assert coverage == pytest.approx(1 / 16) and radius == pytest.approx(0, abs=1e-6)
    assert overlap == 0


def test_a_line_is_not_round_and_half_is_shared():
    maps = torch.zeros(2, 4, 8)
    maps[0, 1, :4] = maps[1, 1, 2:6] = 1 / 4
    coverage, _, roundness, overlap = attention_numbers(maps)
    assert coverage == pytest.approx(4 / 32) and roundness == pytest.approx(0, abs=1e-6)
    assert overlap == pytest.approx(0.5)


def test_overlap_is_the_mean_over_pairs():
    maps = torch.rand(5, 3, 4).softmax(0)
    maps = maps / maps.sum(dim=(1, 2), keepdim=True)
    pairs = [
        torch.minimum(maps[i], maps[j]).sum().item() for i in range(5) for j in range(5) if i != j
    ]
    assert attention_numbers(maps)[3] == pytest.approx(sum(pairs) / 20)


def test_states_even_clustered_and_the_same():
    even = torch.eye(6)
    cosine, directions = state_numbers(even)
    assert cosine == pytest.approx(0, abs=1e-9) and directions == pytest.approx(1)
    clustered = torch.cat([torch.eye(6)[:1].expand(3, 6), -torch.eye(6)[:1].expand(3, 6)])
    assert state_numbers(clustered)[1] == pytest.approx(1 / 5)
    assert state_numbers(torch.ones(4, 6))[0] == pytest.approx(1)
    assert all(math.isnan(x) for x in state_numbers(torch.ones(1, 6)))


def test_a_row_for_every_layer_and_budget(view, tiny, photo):
    rows = viz.measure([view], [1, 8])
    assert [(r.cores, r.layer) for r in rows] == [(c, layer) for c in (1, 8) for layer in (1, 2, 3)]
    assert math.isnan(rows[0].overlap) and not math.isnan(rows[3].overlap)
    maps = view.attention(8)
    expected = attention_numbers(maps[1])
    row = rows[4]
    assert (row.coverage, row.radius, row.roundness, row.overlap) == pytest.approx(expected)
    assert (row.cosine, row.directions) == pytest.approx(state_numbers(view.states(8, 2)))
    lengths = viz.path_lengths(view.run(8).path, view.grid)
    assert rows[3].path == 0 and rows[5].path == pytest.approx(lengths.mean().item(), rel=1e-5)
    other = viz.View(tiny, photo.rotate(90, expand=True), 64)
    alone = viz.measure([other], [8])[1].coverage
    both = viz.measure([view, other], [8])[1].coverage
    assert both == pytest.approx((alone + row.coverage) / 2)
    with pytest.raises(InputError, match="no photos"):
        viz.measure([])


def _made_up(narrow: bool, trained: bool) -> list[Numbers]:
    """Six layers at 8 and 64 cores, as published or without any change."""
    rows = []
    for cores in (8, 64):
        for layer in range(1, 7):
            late = (layer - 1) / 5 if trained else 0.0
            coverage = (0.6 if cores == 8 or not narrow else 0.3) * (1 - 0.5 * late)
            rows.append(
                Numbers(
                    cores=cores,
                    layer=layer,
                    coverage=coverage,
                    radius=0.5,
                    roundness=0.9 - 0.4 * late,
                    overlap=0.5,
                    path=2 * late,
                    cosine=0.1,
                    directions=0.8 - 0.5 * late,
                )
            )
    return rows


def test_verdicts_say_yes_to_the_published_behaviour_and_no_to_none():
    yes = viz.verdicts(_made_up(narrow=True, trained=True))
    assert len(yes) == 5 and all(verdict.holds for verdict in yes)
    no = viz.verdicts(_made_up(narrow=False, trained=False))
    assert [verdict.claim for verdict in no] == [verdict.claim for verdict in yes]
    assert not any(verdict.holds for verdict in no)
    mixed = viz.verdicts(_made_up(narrow=True, trained=False))
    assert [verdict.holds for verdict in mixed] == [True, False, False, False, False]
    assert str(mixed[0]) == "attention gets narrower from 8 to 64 cores: yes (coverage 0.6 -> 0.3)"
    assert str(no[0]).startswith("attention gets narrower from 8 to 64 cores: no (")
    assert str(no[4]) == "cores travel by a patch or more: no (patches 0 -> 0)"


def test_a_change_smaller_than_the_margin_is_no_change():
    rows = _made_up(narrow=False, trained=True)
    slightly = [
        Numbers(**{**vars(r), "coverage": r.coverage * (0.97 if r.cores == 64 else 1)})
        for r in rows
    ]
    assert not viz.verdicts(slightly)[0].holds


def test_one_budget_or_layer_makes_no_verdict_on_its_change():
    rows = [row for row in _made_up(True, True) if row.cores == 64]
    assert not any("narrower" in verdict.claim for verdict in viz.verdicts(rows))
    assert len(viz.verdicts([row for row in rows if row.layer == 6])) == 1


def test_the_summary_names_fresh_weights():
    found = viz.verdicts(_made_up(True, False))
    fresh, trained = (numbers.summary(found, fresh) for fresh in (True, False))
    assert fresh.startswith("Fresh random weights: 1 of 5")
    assert trained == "These weights show 1 of 5 published behaviours."
    every = viz.verdicts(_made_up(True, True))
    assert numbers.summary(every, False) == "These weights show all 5 published behaviours."


def test_table_and_csv_hold_every_number(tmp_path):
    rows = _made_up(True, True)
    rows[0] = Numbers(**{**vars(rows[0]), "overlap": math.nan})
    header, body = numbers.text_table(rows, [1, 6])
    assert header == ["cores", "layer", *numbers.MEASURES] and len(body) == 4
    assert body[0][:3] == ["8", "1", "0.600"] and body[0][5] == ""
    numbers.write_csv(tmp_path / "n.csv", rows)
    back = numbers.read_csv(tmp_path / "n.csv")
    assert math.isnan(back[0].overlap) and len(back) == len(rows)
    for one, other in zip(back[1:], rows[1:], strict=True):
        assert vars(one) == pytest.approx(vars(other))


def test_curves_have_a_panel_a_measure():
    figure = viz.draw_numbers(_made_up(True, True), ("coverage", "path"))
    assert [panel.title for panel in figure.panels] == ["coverage", "path"]
    assert figure.image().width > 300
