"""`benchmarks.planning.predict`: both arms in one report, and goals that do not move."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.benchmark import Arguments
from benchmarks.planning import predict
from benchmarks.planning.predict import BENCHMARK, Pair


def pair(predicted, first, second):
    """A step that was predicted with 20 % to either side."""
    return Pair(
        *("step_seconds", "digits", "resnet8", 32, 8, 1),
        *(predicted, 0.8 * predicted, 1.2 * predicted, first, second),
    )


@pytest.fixture
def arms(monkeypatch):
    """Whether the burner burned, for each arm that was measured."""
    burning, found = [], []

    class Burner:
        def __init__(self, core, *, seed):
            assert (core, seed) == (predict.LAST_CORE, 0)

        def __enter__(self):
            burning.append(True)

        def __exit__(self, *_):
            burning.pop()

    def measured(_arguments, _folder):
        found.append(bool(burning))
        beside = found[-1]
        steps = [pair(1.0, 1.5, 1.7), pair(1.0, 1.1, 1.1)] if beside else [pair(1.0, 1.0, 1.4)]
        profile = SimpleNamespace(load=None, probe_seconds=20.0)
        return [SimpleNamespace(profile=profile, step_seconds=steps, peak_bytes=steps)]

    monkeypatch.setattr(predict, "Burner", Burner)
    monkeypatch.setattr(predict, "_measured", measured)
    monkeypatch.setattr(predict, "_pairs", lambda some, quantity: getattr(some[0], quantity))
    monkeypatch.setattr(predict, "_limit", lambda _: {"at": 0.9, "next": 1.1})
    monkeypatch.setattr(predict, "_probe_share", lambda _: 0.3)
    return found


def test_steps_are_predicted_alone_and_beside_a_load_and_goals_do_not_follow_the_noise(arms):
    arguments = Arguments(full=False, data=Path("data"), json=None)
    found, measurements = predict.predictions(arguments, Path("folder"))
    assert arms == [False, True]
    values = BENCHMARK.values(found)
    assert values["step_seconds_worst_error"].goal == 0.10
    assert not values["step_seconds_worst_error"].met  # 17 %, where two measurements differ by 33 %
    assert values["step_seconds_median_error"].value == pytest.approx(0.2 / 1.2)
    beside = {
        name.removesuffix("_beside"): (one.value, one.goal)
        for name, one in values.items()
        if name.endswith("_beside")
    }
    assert beside == {
        "step_seconds_median_error": (pytest.approx((0.6 / 1.6 + 0.1 / 1.1) / 2), 0.10),
        "repeat_error": (pytest.approx(0.2 / 1.6), None),
        "interval_coverage": (0.5, 22 / 24),
        "interval_half_width": (pytest.approx(0.2), None),
    }
    assert len(measurements["step_seconds_beside"]) == 2


def test_a_probe_runs_in_a_process_of_its_own_so_that_the_burner_is_anothers(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(predict, "batchwright", lambda *words: asked.append(words))
    monkeypatch.setattr(predict, "read_record", lambda path, kind: (path, kind))
    monkeypatch.setattr(predict.bw, "plan", lambda profile: profile)
    monkeypatch.setattr(predict, "_check", lambda workload, points: None)
    workloads = predict._measured(Arguments(full=False, data=Path("d"), json=None), tmp_path)
    assert len(workloads) == len(asked) == 6
    assert asked[-1] == (
        *("probe", "device=cpu", "network=mobilenet_small", "epochs=90"),
        *("data=imagefolder:d/imagenette2-160", "resolutions=64"),
        *("probe.budget=20.0", "probe.learning=0", "--out", tmp_path / "profile.json"),
    )
