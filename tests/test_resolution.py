"""`planning.resolution`: which resolution and rate when, and what is refused."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import JobError
from batchwright.planning.resolution import (
    preset_doubts,
    rising_sides,
    schedule_of,
    settled,
    sub_stages,
)
from batchwright.records import Job
from batchwright.records.job import check_job
from batchwright.records.job_sections import Cycle
from batchwright.records.registries.presets import PRESETS
from samples import make_data

CIFAR100 = make_data(name="cifar100", classes=tuple(f"c{n}" for n in range(100)), side=32)
IMAGENET = make_data(name="imagefolder", classes=tuple(f"c{n}" for n in range(1000)), side=160)


def job_of(method="cyclic", **changes):
    return Job(data="cifar100:x", method=method, **changes)


def table_of(job, data=CIFAR100):
    """(epochs, up to which epoch, side, relative rate, dropout) of each row."""
    job = settled(job, data)
    schedule = schedule_of(job)
    rows, end = [], 0
    for part in schedule.parts:
        end += part.epochs
        side, dropout = schedule.resolutions[part.level], schedule.dropouts[part.level]
        rate = round(schedule.rates[part.rate_stage], 9)
        rows.append((part.epochs, end, side, rate, dropout))
    return rows


@pytest.mark.parametrize("method", ["cyclic", "hybrid"])
def test_the_cifar100_preset_has_the_published_stage_table(method):
    assert table_of(job_of(method, cycle={"preset": "cifar100"})) == [
        (40, 40, 24, 1.0, 0.1),
        (40, 80, 32, 1.0, 0.2),
        (20, 100, 24, 0.1, 0.1),
        (20, 120, 32, 0.1, 0.2),
        (10, 130, 24, 0.01, 0.1),
        (10, 140, 32, 0.01, 0.2),
    ]


def test_the_imagenet_preset_has_the_published_stage_table():
    assert table_of(job_of(cycle={"preset": "imagenet"}), IMAGENET) == [
        (20, 20, 160, 1.0, 0.1),
        (20, 40, 224, 1.0, 0.2),
        (20, 60, 288, 1.0, 0.3),
        (10, 70, 160, 0.1, 0.1),
        (10, 80, 224, 0.1, 0.2),
        (10, 90, 288, 0.1, 0.3),
        (5, 95, 160, 0.01, 0.1),
        (5, 100, 224, 0.01, 0.2),
        (5, 105, 288, 0.01, 0.3),
    ]


def test_the_presets_have_the_published_rates_and_batches():
    found = {name: (one.rates, one.batches, sum(one.stage_epochs)) for name, one in PRESETS.items()}
    assert found == {
        "cifar100": ((0.2, 0.02, 0.002), (600, 560), 140),
        "imagenet": ((0.2, 0.02, 0.002), (2330, 1110, 740), 105),
    }


def test_what_the_job_says_goes_before_the_preset():
    given_ = job_of(
        epochs=70,
        dropout=0.3,
        resolutions=(16, 32),
        cycle={"preset": "cifar100", "stage_rates": (1, 0.5, 0.25)},
    )
    assert table_of(given_) == [
        (20, 20, 16, 1.0, 0.3),
        (20, 40, 32, 1.0, 0.3),
        (10, 50, 16, 0.5, 0.3),
        (10, 60, 32, 0.5, 0.3),
        (5, 65, 16, 0.25, 0.3),
        (5, 70, 32, 0.25, 0.3),
    ]


def test_stages_given_with_a_preset_say_how_many_epochs_there_are():
    job = settled(job_of(cycle={"preset": "cifar100", "stage_epochs": (4, 2)}), CIFAR100)
    assert job.epochs == 6
    assert schedule_of(job).rates == (1.0, 0.1)


@pytest.mark.parametrize("preset", ["none", "cifar100", "imagenet"])
def test_settling_twice_changes_nothing(preset):
    once = settled(job_of(cycle={"preset": preset}), CIFAR100)
    assert settled(once, CIFAR100) == once


def test_a_preset_means_nothing_to_methods_without_a_cycle():
    job = settled(job_of("dual-batch", cycle={"preset": "cifar100"}), CIFAR100)
    assert (job.epochs, job.resolutions) == (30, (32,))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (CIFAR100, ()),
        (make_data(side=8), ("100 classes, digits has 10", "images of 32 px, digits has 8 px")),
        (CIFAR100.model_copy(update={"side": 160}), ("images of 32 px, cifar100 has 160 px",)),
    ],
)
def test_a_preset_says_why_it_does_not_suit_the_data(data, words):
    doubts = preset_doubts(PRESETS["cifar100"], data)
    assert len(doubts) == len(words)
    for doubt, word in zip(doubts, words, strict=True):
        assert word in doubt


def test_the_imagenet_preset_suits_any_folder_of_a_thousand_classes_that_is_large_enough():
    assert preset_doubts(PRESETS["imagenet"], IMAGENET) == ()
    assert "160 px or more" in preset_doubts(PRESETS["imagenet"], CIFAR100)[1]


# ------------------------------------------------------------------------------- stages and parts


def test_stages_are_four_two_and_one_parts_and_the_rate_falls_to_a_tenth_each():
    schedule = schedule_of(settled(job_of(epochs=28), CIFAR100))
    assert schedule.stage_epochs.value == (16, 8, 4)
    assert schedule.rates == pytest.approx((1.0, 0.1, 0.01))


@pytest.mark.parametrize(
    ("stages", "sides", "expected"),
    [
        ((5,), 2, [2, 3]),  # the higher resolution gets the odd epoch
        ((5,), 3, [1, 2, 2]),
        ((4,), 3, [1, 1, 2]),
        ((1,), 3, [1]),  # and the only one
        ((7, 2), 3, [2, 2, 3, 1, 1]),
    ],
)
def test_odd_epochs_go_to_higher_resolutions(stages, sides, expected):
    parts = sub_stages(stages, sides, "cycle")
    assert [part.epochs for part in parts] == expected
    assert all(part.level == sides - 1 for part in parts if part.epochs == 1 and stages == (1,))


@given(
    st.lists(st.integers(min_value=1, max_value=90), min_size=1, max_size=5),
    st.integers(min_value=1, max_value=4),
    st.sampled_from(["cycle", "one-pass", "fixed"]),
)
def test_every_epoch_is_in_one_row_and_every_stage_keeps_its_length(stages, sides, order):
    parts = sub_stages(stages, sides, order)
    for stage, epochs in enumerate(stages):
        assert sum(part.epochs for part in parts if part.rate_stage == stage) == epochs
    assert [part.rate_stage for part in parts] == sorted(part.rate_stage for part in parts)
    levels = [part.level for part in parts]
    if order == "fixed":
        assert set(levels) == {sides - 1}
    elif order == "one-pass":
        assert levels == sorted(levels)
    else:
        for stage in range(len(stages)):
            within = [part.level for part in parts if part.rate_stage == stage]
            assert within == sorted(set(within))
            assert within[-1] == sides - 1  # each ends at the resolution that is evaluated


def test_one_pass_goes_through_the_resolutions_once_whatever_the_stages():
    job = job_of(epochs=12, cycle={"order": "one-pass", "stage_epochs": (8, 4)})
    rows = [(epochs, side, rate) for epochs, _, side, rate, _ in table_of(job)]
    assert rows == [(6, 24, 1.0), (2, 32, 1.0), (4, 32, 0.1)]


def test_shares_divide_a_stage_unevenly():
    job = job_of(epochs=12, cycle={"stage_epochs": (8, 4), "shares": (1, 3)})
    assert [row[0] for row in table_of(job)] == [2, 6, 1, 3]


def test_a_fixed_resolution_is_the_highest_throughout():
    job = job_of(epochs=7, cycle={"order": "fixed"}, resolutions=(24, 32))
    assert [(row[0], row[2]) for row in table_of(job)] == [(4, 32), (2, 32), (1, 32)]


def test_training_of_two_epochs_has_two_stages_at_the_highest_resolution():
    job = job_of(epochs=2, resolutions=(24, 32))
    assert [(row[0], row[2], row[3]) for row in table_of(job)] == [(1, 32, 1.0), (1, 32, 0.1)]


# --------------------------------------------------------------------------------- resolutions


@pytest.mark.parametrize("top", [6, 8, 10, 16, 20, 28, 32, 48, 64, 65, 96, 128, 160, 224, 288])
def test_resolutions_rise_to_the_top_in_even_steps(top):
    sides = rising_sides(top)
    assert sides[-1] == top
    assert list(sides) == sorted(set(sides))
    assert all(side % (4 if top >= 16 else 2) == 0 for side in sides[:-1])
    assert len(sides) == (3 if top > 64 else 2)


def test_resolutions_below_the_networks_least_are_left_out():
    assert settled(job_of(), make_data(side=8)).resolutions == (6, 8)
    assert settled(job_of(), make_data(side=8), least_side=8).resolutions == (8,)
    assert settled(job_of("plain"), make_data(side=8)).resolutions == (8,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"cycle": {"stage_epochs": (80, 40, 20)}},
            r"stage_epochs=80,40,20 add up to 140, not to epochs=30: give epochs=140",
        ),
        ({"cycle": {"dropouts": (0.1, 0.2, 0.3)}}, r"cycle.dropouts=.*3 values for 2 resolution"),
        ({"cycle": {"strengths": (1, 2, 3)}}, "cycle.strengths=.*one for each, or one for all"),
        ({"cycle": {"shares": (1, 2, 3)}}, "cycle.shares="),
        (
            {"cycle": {"stage_rates": (1, 0.1), "stage_epochs": (10, 10, 10)}},
            "stage_rates=.*2 rates for 3",
        ),
        ({"resolutions": (32,)}, "one resolution, 32 px.*resolutions=24,32.*cycle.order=fixed"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, named):
    with pytest.raises(JobError, match=named):
        check_job(settled(job_of(**changes), CIFAR100))


def test_whatever_a_preset_replaces_can_be_kept():
    (names,) = get_args(Cycle.model_fields["keep"].annotation)[:1]
    replaced = {"epochs"}.union(*(preset.recipe for preset in PRESETS.values()))
    assert {*get_args(names)} == replaced
    with pytest.raises(JobError, match=r"cycle.keep=zoom keeps keys from cycle.preset"):
        Job(method="cyclic", cycle={"keep": ("zoom",)})
