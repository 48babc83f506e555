"""Which number format is chosen, at which batch, and how surely, on machines that are invented."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from batchwright.distributed.group import Group
from batchwright.planning.measurements import measured_precision
from batchwright.probing.bench import Bench, sides_of
from batchwright.probing.commands import Compared
from batchwright.probing.measure import comparison
from batchwright.probing.measure import precision as module
from batchwright.probing.measure.comparison import WORTHWHILE, compare
from batchwright.probing.measure.precision import (
    USUAL_BATCH,
    choose_precision,
    formats_of,
    planned_batch,
)
from batchwright.records import Goal
from samples import make_cluster, make_data, make_job, make_profile
from test_probe import tiny_image_data, tiny_job

CPU = torch.device("cpu")
MIB = 2**20


@dataclass
class Machine:
    """Stands for benches and clock: a step takes a fixed time and one for each sample.

    Attributes:
        float32: Seconds of a step whatever the batch, and seconds a sample.
        bfloat16: Likewise.
        replayed: The same of a step that is replayed, by the formats that can be.
        scatter: Relative standard deviation of a step.
        drift: What the machine slows down by with each step, as a share.
        sample_bytes: Memory of a sample in float32.
        held: Memory that a GPU holds besides, as images are.
        broken: Steps in bfloat16 whose gradient is not finite.
    """

    float32: tuple[float, float]
    bfloat16: tuple[float, float]
    replayed: dict[str, tuple[float, float]] = field(default_factory=dict)
    scatter: float = 0.0
    drift: float = 0.0
    sample_bytes: int = MIB
    held: int = 0
    broken: int = 0
    seconds: float = 0.0
    steps: int = 0
    weighed: list[int] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def bench(self, job, data, group):
        usual = getattr(self, job.precision)
        graphs = SimpleNamespace(
            on=job.cuda_graphs == "on",
            holds=int(job.cuda_graphs == "on" and job.precision in self.replayed),
            end=lambda: vars(graphs).update(on=False, holds=0),
        )

        def step(size):
            fixed, each = self.replayed[job.precision] if graphs.holds else usual
            self.steps += 1
            took = (fixed + each * size) * (1 + self.drift) ** self.steps
            took *= self.random.lognormvariate(0, self.scatter)
            self.seconds += took
            return took, 0.0

        return SimpleNamespace(
            job=job,
            group=group,
            first_steps=0,
            graphs=graphs,
            supply=lambda size, resolution: size,
            step=step,
            live_bytes=lambda: 0,
            parts=lambda: SimpleNamespace(gradients=0),
            broken_steps=self.broken if job.precision == "bfloat16" else 0,
        )

    def weigh(self, bench, size):
        self.weighed.append(size)
        bench.step(size)
        return self.held + self.sample_bytes * size, None


def chosen(machine, monkeypatch, *, seconds=1.0, samples=50_000, bfloat16=True, **changes):
    monkeypatch.setattr(module, "half_of", lambda device: "bfloat16" if bfloat16 else None)
    monkeypatch.setattr(module, "Bench", machine.bench)
    monkeypatch.setattr(module, "weigh", machine.weigh)
    monkeypatch.setattr(module, "held_bytes", lambda bench: machine.held)
    for part in (module, comparison):
        monkeypatch.setattr(part, "now", lambda device: machine.seconds)
    monkeypatch.setattr(module, "memory_of_each", lambda group, neighbours: 2**40)
    data = SimpleNamespace(facts=make_data(train_samples=samples))
    job = make_job(**{"precision": "auto", "resolutions": (32,), **changes})
    return choose_precision(job, data, Group(CPU), seconds=seconds)


def test_the_format_is_that_which_is_faster_at_the_batch_in_question(monkeypatch):
    """With few samples float32 is the faster: 14.2 against 14.7 ms at 9."""
    machine = Machine(float32=(0.013, 0.00013), bfloat16=(0.0142, 0.00006), scatter=0.02)
    choice = chosen(machine, monkeypatch)
    assert choice.precision == "bfloat16"
    assert [one.local_batch_size for one in choice.times] == [USUAL_BATCH, USUAL_BATCH]
    assert choice.ratio.wanted_batch_size == USUAL_BATCH
    assert choice.ratio.ratio.value == pytest.approx(0.0296 / 0.0463, rel=0.05)
    assert choice.ratio.ratio.high < 1


@pytest.mark.parametrize("batch", [16, 64, 600])
def test_a_batch_that_is_given_decides(monkeypatch, batch):
    machine = Machine(float32=(0.002, 0.00013), bfloat16=(0.006, 0.00006))
    choice = chosen(machine, monkeypatch, global_batch=batch, workers=1, seconds=5)
    assert choice.times[0].local_batch_size == batch
    assert choice.precision == ("bfloat16" if 0.00007 * batch > 0.004 else "float32")


@pytest.mark.parametrize(
    ("ratio", "precision"),
    [(0.6, "bfloat16"), (0.97, "bfloat16"), (0.99, "float32"), (1.3, "float32")],
)
def test_a_drifting_machine_does_not_decide(monkeypatch, ratio, precision):
    machine = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0002 * ratio), drift=0.01)
    choice = chosen(machine, monkeypatch)
    assert choice.precision == precision
    assert choice.ratio.ratio.value == pytest.approx(ratio, rel=0.005)


def test_a_clear_difference_needs_few_rounds_and_a_small_one_all_the_time(monkeypatch):
    clear = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0001), scatter=0.03)
    level = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0002), scatter=0.03)
    assert chosen(clear, monkeypatch, seconds=3).ratio.rounds == 3
    choice = chosen(level, monkeypatch, seconds=3)
    assert choice.ratio.ratio.high > WORTHWHILE
    assert 3 <= level.seconds < 3.5
    assert choice.ratio.rounds > 5


def test_time_and_memory_bound_the_batch_that_is_compared(monkeypatch):
    slow = Machine(float32=(0, 0.02), bfloat16=(0, 0.01))
    choice = chosen(slow, monkeypatch, seconds=4)
    assert 2 < choice.times[0].local_batch_size < USUAL_BATCH
    assert slow.seconds < 6
    large = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0001))
    choice = chosen(large, monkeypatch, goal=Goal(memory=100 * MIB))
    assert choice.times[0].local_batch_size == 50  # half of it is left for what was not foreseen
    assert choice.precision == "bfloat16"


@pytest.mark.parametrize("held", [0, 100 * MIB, 1000 * MIB])
def test_images_that_stay_on_a_gpu_do_not_lessen_the_batch_that_is_compared(monkeypatch, held):
    """Eight samples were weighed with them: at few samples float32 is the faster here."""
    machine = Machine(float32=(0.012, 0.000013), bfloat16=(0.0122, 0.000007), held=held)
    memory = held + 2 * USUAL_BATCH * machine.sample_bytes
    choice = chosen(machine, monkeypatch, goal=Goal(memory=memory))
    assert choice.times[0].local_batch_size == USUAL_BATCH
    assert choice.precision == "bfloat16"


@pytest.mark.parametrize(
    ("both", "keys", "precision"),
    [
        (True, {}, "bfloat16"),
        (True, {"cuda_graphs": "on"}, "bfloat16"),
        (True, {"cuda_graphs": "off"}, "float32"),
        (True, {"compile": "on"}, "float32"),
        (True, {"network": "my.module:network"}, "float32"),
        (True, {"device": "cpu"}, "float32"),
        (False, {}, "float32"),  # one cannot be replayed, so neither is
    ],
    ids=str,
)
def test_formats_are_compared_replayed_where_a_training_may_be(monkeypatch, both, keys, precision):
    """As `resnet18` at 32 px on an H200, which trained in float32 at 0.69 of the speed."""
    replayed = {"float32": (0.004, 0.0000195), "bfloat16": (0.003, 0.0000124)}
    machine = Machine(
        float32=(0.0120, 0.0000023),
        bfloat16=(0.0123, 0.0000024),
        replayed=replayed if both else {"bfloat16": replayed["bfloat16"]},
    )
    choice = chosen(machine, monkeypatch, **{"device": "cuda", "network": "resnet18"} | keys)
    assert choice.precision == precision


def test_short_steps_are_not_compared_at_few_samples_however_small_the_budget(monkeypatch):
    machine = Machine(float32=(0.013, 0.00013), bfloat16=(0.0142, 0.00006))
    choice = chosen(machine, monkeypatch, seconds=0.01)
    assert choice.times[0].local_batch_size == USUAL_BATCH
    assert machine.seconds < 2


def test_what_a_plan_may_choose_is_compared():
    assert planned_batch(make_job(global_batch=300, workers=2), 50_000, 2) == 150
    assert planned_batch(make_job(global_batch=300, micro_batch=40), 50_000, 1) == 40
    assert planned_batch(make_job(), 50_000, 1) == USUAL_BATCH
    assert planned_batch(make_job(goal=Goal(least_steps=10)), 1437, 2) == 71
    assert planned_batch(make_job(), 8, 2) == 2


def test_there_is_nothing_to_compare_without_hardware_or_choice(monkeypatch):
    machine = Machine(float32=(0, 1), bfloat16=(0, 1))
    assert chosen(machine, monkeypatch, bfloat16=False) == Compared(precision="float32")
    assert chosen(machine, monkeypatch, precision="bfloat16") == Compared(precision="bfloat16")
    assert not machine.steps


def test_the_interval_holds_the_ratio_of_noisy_turns():
    def ratio_of(seed):
        draw = random.Random(seed)
        answers = iter([True] * 5 + [False])
        plain, half = (lambda: draw.lognormvariate(0, 0.1)), (lambda: draw.lognormvariate(0, 0.1))
        return compare((plain, half), lambda: next(answers))[1]

    held = sum(ratio.low <= 1 <= ratio.high for ratio in map(ratio_of, range(200)))
    assert held >= 180


def test_the_reason_tells_batch_ratio_and_interval(monkeypatch):
    def why(machine, **named):
        choice = chosen(machine, monkeypatch, **named)
        profile = make_profile(precisions=choice.times, precision_ratio=choice.ratio)
        return measured_precision(profile, choice.precision).why

    clear = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0001), scatter=0.01)
    assert "of 256 images" in why(clear)
    assert " 0.50 times as long (0.4" in why(clear)
    assert "certain" not in why(clear)
    level = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0002), scatter=0.05)
    assert "not certain to be a difference" in why(level)
    slow = Machine(float32=(0, 0.02), bfloat16=(0, 0.01))
    assert "The choice is for 256 images" in why(slow)


@pytest.mark.parametrize(
    ("formats", "precision", "said"),
    [
        ((), "float32", "The one the profile was taken in, on {}."),
        (
            ("float32",),
            "float32",
            "{} computes in float32 alone: it has no instructions for 16",
        ),
        (
            ("float32",),
            "bfloat16",
            "taken in, on {}, which has no instructions for 16-bit formats.",
        ),
        (("float32", "bfloat16"), "bfloat16", "on {}, which computes in float32 and bfloat16."),
        (("float32", "bfloat16"), "float16", "The one the profile was taken in, on {}."),
    ],
)
def test_the_reason_tells_which_formats_the_processor_computes_in(formats, precision, said):
    """Where there was no other, it only said that the profile was taken in this one."""
    cluster = make_cluster(formats=formats)
    why = measured_precision(make_profile(cluster=cluster), precision).why
    assert said.format(cluster.device_name) in why


@pytest.mark.parametrize("half", [None, "bfloat16"])
def test_workers_whose_processors_differ_in_their_formats_do_not_compare_any(monkeypatch, half):
    """Those without a 16-bit format were done at once, and the others waited for them."""
    others = None if half else "bfloat16"
    mixed = SimpleNamespace(device=CPU, gather=lambda value: [value, others])
    monkeypatch.setattr(module, "half_of", lambda device: half)
    monkeypatch.setattr(module, "Bench", None)
    data = SimpleNamespace(facts=make_data())
    compared = choose_precision(make_job(precision="auto"), data, mixed, seconds=1)
    assert compared == Compared(precision="float32")
    assert formats_of(mixed) == ("float32",)


def test_a_format_whose_gradients_are_not_finite_is_not_taken(monkeypatch):
    """PyTorch's bfloat16 on CPUs has such for 3 x 3 convolutions of one pixel, now and then."""
    machine = Machine(float32=(0, 0.0002), bfloat16=(0, 0.0001), broken=1)
    choice = chosen(machine, monkeypatch)
    assert choice.precision == "float32"
    profile = make_profile(precisions=choice.times, precision_ratio=choice.ratio)
    why = measured_precision(profile, choice.precision).why
    assert " 0.50 times as long" in why
    assert "Gradients in bfloat16 were infinite or not a number where those in float32 were" in why


def test_steps_whose_gradient_is_not_finite_are_counted():
    data = tiny_image_data()
    bench = Bench(tiny_job(), data, Group(CPU))
    supply = bench.supply(4, max(sides_of(bench.job)))
    bench.step(supply)
    assert bench.broken_steps == 0
    batch = supply()
    bench.step(lambda: (torch.full_like(batch[0], torch.inf), *batch[1:]))
    assert bench.broken_steps == 1


def test_real_steps_are_compared(monkeypatch):
    monkeypatch.setattr(module, "half_of", lambda device: "bfloat16")
    job = tiny_job(precision="auto", global_batch=8)
    choice = choose_precision(job, tiny_image_data(), Group(CPU), seconds=0.5)
    assert [one.precision for one in choice.times] == ["float32", "bfloat16"]
    assert {one.local_batch_size for one in choice.times} <= {2, 4, 8}
    assert choice.precision == ("bfloat16" if choice.ratio.ratio.value <= WORTHWHILE else "float32")
