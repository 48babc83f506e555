"""The prior of the learning curve against the trainings that it comes from."""

from __future__ import annotations

import random
import sys
from collections import Counter
from math import exp, log, sqrt
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks.tools import learning_prior
from benchmarks.tools.learning_prior import (
    DIFFERENT,
    OPTIMIZERS,
    TEN_CLASSES,
    WIDE,
    at_usual_rates,
    compared,
    fitted,
    numbers_of,
    scatter,
    trainings,
)

from batchwright.prediction.accuracy.trainings import Observed
from batchwright.records.registries.optimizers import LearningPrior
from test_learning import made_up


@pytest.mark.slow
def test_the_shipped_prior_is_what_its_trainings_say_but_for_what_was_chosen_otherwise() -> None:
    tasks = trainings()
    assert len(tasks) == 7
    assert Counter(len(seen) for seen in at_usual_rates(tasks).values())[0] == 0
    found = compared(tasks)
    assert {one.name for one in found if not one.agrees} == set(DIFFERENT)
    # All numbers of SGD's and Muon's prior, mean and spread.
    assert len(found) == 2 * (3 + 2 + len(LearningPrior._fields)) + 2


def made_tasks(levels: tuple[float, ...], ahead: float, scattered: float = 0.0):
    """Trainings of tasks whose curves are known, Muon's level that much higher."""
    source = random.Random(1)
    return {
        f"made-{place}": [
            Observed(name, batch, samples, 0.1 + 0.9 / (1 + exp(-logit)), 10**6)
            for name, more in zip(OPTIMIZERS, (0.0, ahead), strict=True)
            for batch in (32, 128, 512)
            for samples in (20_000, 80_000, 320_000)
            for unit in [(made_up(level + more, 0.6, 200.0, batch, samples) - 0.1) / 0.9]
            for logit in [log(unit / (1 - unit)) + source.gauss(0, scattered)]
        ]
        for place, level in enumerate(levels)
    }


@pytest.fixture
def ten_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_prior, "classes_of", lambda _: 10)


@pytest.mark.usefixtures("ten_classes")
def test_numbers_of_made_up_tasks_come_back() -> None:
    prior = learning_prior.by_usual_rates(made_tasks((-2.0, -1.0, 0.0), ahead=0.8))
    assert prior.level.mean == pytest.approx(-1, abs=0.1)
    assert prior.level.error == pytest.approx(1, abs=0.1)
    assert exp(prior.slope.mean) == pytest.approx(0.6, abs=0.05)
    assert exp(prior.critical.mean) == pytest.approx(200, rel=0.2)
    muon = prior.of("muon")
    assert muon.level.mean == pytest.approx(0.8, abs=0.05)
    assert muon.slope.mean == pytest.approx(0, abs=0.05)
    assert muon.level.error < 0.2


@pytest.mark.usefixtures("ten_classes")
def test_levels_are_compared_at_the_best_rates() -> None:
    """At a weight of 0.3 SGD gains 0.3 by a rate of e times the usual one, Muon nothing."""
    seen = made_tasks((-1.0,), ahead=0.8)["made-0"]
    for one in list(seen):
        for offset in (-1.1, 1.1, 2.2):
            best = 1.0 if one.optimizer == "sgd" else 0.0
            unit = (one.accuracy - 0.1) / 0.9
            logit = log(unit / (1 - unit)) + 0.3 * (2 * best * offset - offset**2)
            accuracy = 0.1 + 0.9 / (1 + exp(-logit))
            seen.append(one._replace(accuracy=accuracy, offset=offset))
    found = numbers_of(fitted("made-0", seen, WIDE))
    assert found["sgd", "best_rate"].mean == pytest.approx(1, abs=0.05)
    assert exp(found["muon", "rate_weight"].mean) == pytest.approx(0.3, abs=0.03)
    assert found["muon", "level"].mean == pytest.approx(0.5, abs=0.05)


@pytest.mark.usefixtures("ten_classes")
@pytest.mark.parametrize("scattered", [0.05, 0.2])
def test_scatter_around_curves_comes_back(
    scattered: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.prediction.accuracy.learning.SHORTER_ERROR", 0.0)
    tasks = made_tasks((-2.0, -1.0, -0.5, 0.0), ahead=0.8, scattered=scattered)
    found = scatter(tasks, WIDE)
    assert found.mean == pytest.approx(scattered, rel=0.3)
    # Of 72 trainings, and six parameters of each of four tasks: 48 degrees of freedom.
    assert found.error == pytest.approx(found.mean / sqrt(2 * 48), rel=0.5)


def test_the_first_task_has_trainings_at_the_usual_rate_alone() -> None:
    assert not learning_prior.has_rates(trainings()[TEN_CLASSES])
