"""The hybrid in real processes: time and accuracy against large batches and each half alone.

12,288 training images of CIFAR-100, evenly drawn, and all 10,000 held-out ones; `resnet8`, bfloat16
where the processor computes in it; two workers with a core each and the parameter server besides
(`asp`), real processes throughout, started as a user starts them. 14 epochs in three stages of the
learning rate (4, 2 and 1 parts of them, each with a tenth of the rate before; 0.1 at batch 128,
scaled with the square root to 500). The arms:

    large     both workers with local batch 500, the paper's, at 32 px
    dual      one worker with 500, one with the small batch that takes 1.1 times the time, at 32 px
    cyclic    both workers with 500, each stage through 24 and 32 px
    hybrid    the batches of `dual` through the resolutions of `cyclic`

The job is probed once. The plans of `dual` and `hybrid` are made as `batchwright run` makes them:
their two batches are measured side by side, and the plan is made again until the rounds agree.
Epochs and samples are the same in all arms. One training at a time has the machine to itself, and a
different arm comes first with each seed. Seeds 0 to 4 (--quick: 0) are paired: the same initial
weights, the same order of samples.

`hybrid_time_saved` is 1 - hybrid / large of the seconds of training, which include exchange and
waiting but no evaluation; median and quartiles. Accuracy is that of the last epoch; gains are mean
differences in points with their 95 % interval. Goals: 8.9 % of the time, which the paper saved with
three of four workers on small batches (10.1 % with none, 5.1 % with half of them, as here), and a
gain in accuracy whose interval is above 0.

--full takes some 17 minutes on two cores. --keep keeps plans and finished trainings, so that it can
be stopped and started again without a second probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batchwright.records import Plan, Profile
from batchwright.records.documents import read_record, write_record
from batchwright.workflows import verbs
from batchwright.workflows.match_rounds import pair_measurer_for, pairs_of, settle
from benchmarks.harness.benchmark import Arguments, Benchmark, Found, say
from benchmarks.harness.figures import Figure, differences, ratios
from benchmarks.harness.images import smaller_cifar100
from benchmarks.harness.kept_runs import KeptRuns, Run, Runs, Wanted, accuracies_of, plain_runs
from benchmarks.harness.plans import job_from, quick_precision

IMAGES, EPOCHS, WORKERS, LARGE_BATCH = 12_288, 14, 2, 500
SIDES, EXTRA_TIME = (24, 32), 1.1
SEEDS, PROBE_SECONDS = range(5), 30.0

ONE_SIZE = {"small_workers": 0, "extra_time": 1.0, "large_batches": (LARGE_BATCH,)}
TWO_SIZES = {"small_workers": 1, "extra_time": EXTRA_TIME, "large_batches": (LARGE_BATCH,)}
ONE_SIDE: dict[str, Any] = {"resolutions": SIDES[-1:], "cycle": {"order": "fixed"}}
ARMS: dict[str, dict[str, Any]] = {
    "large": {"dual": ONE_SIZE, **ONE_SIDE},
    "dual": {"dual": TWO_SIZES, **ONE_SIDE},
    "cyclic": {"dual": ONE_SIZE},
    "hybrid": {"dual": TWO_SIZES},
}
ARM_WORDS = {
    "large": "large batches at 32 px",
    "dual": "two batch sizes at 32 px",
    "cyclic": "large batches through 24 and 32 px in each stage",
    "hybrid": "`hybrid`, two batch sizes through 24 and 32 px in each stage",
}


def figures_of(
    arm_words: Mapping[str, str], time: str = "training time", at_least: float | None = None
) -> tuple[Figure, ...]:
    """The figures of `hybrid` beside the other arms.

    Args:
        arm_words: Descriptions of the arms, by name.
        time: What the times are, for the descriptions of figures.
        at_least: Goal: share of the time of large batches that `hybrid` saves.
    """
    large = arm_words["large"]
    return (
        Figure("hybrid_time_saved", "share", "median", f"{time} that `hybrid` saves over {large}",
               at_least=at_least),
        Figure("hybrid_accuracy_points", "points", "interval",
               f"accuracy of `hybrid` minus accuracy with {large}, paired seeds", above=0.0),
        Figure("hybrid_over_dual_points", "points", "interval",
               f"accuracy of `hybrid` minus accuracy with {arm_words['dual']}"),
        Figure("hybrid_over_cyclic_points", "points", "interval",
               f"accuracy of `hybrid` minus accuracy with {arm_words['cyclic']}"),
        *(
            Figure(f"seconds_{arm}_over_large", "ratio", "median",
                   f"{time} over that of {large}: {words}")
            for arm, words in arm_words.items()
            if arm != "large"
        ),
        *(
            Figure(f"accuracy_{arm}", "%", "mean", f"accuracy: {words}")
            for arm, words in arm_words.items()
        ),
    )  # fmt: skip


BENCHMARK = Benchmark(
    "hybrid",
    "Two batch sizes and low resolutions first, in real processes",
    "CIFAR-100, `resnet8`, two workers with a core each and the parameter server besides, 14 "
    "epochs in three stages of the rate; spread of an accuracy: smallest and largest",
    figures_of(ARM_WORDS, at_least=0.089),
    seeds=SEEDS,
    needs_data="always",
)  # fmt: skip


def measure(arguments: Arguments, folder: Path) -> Found:
    """Train all arms with each seed."""
    keep = arguments.keep
    keep.mkdir(parents=True, exist_ok=True)
    plans = _plans(smaller_cifar100(arguments.data, IMAGES, folder / "images"), keep, folder)
    wanted = in_turns(plans, SEEDS if arguments.full else (0,))
    runs = KeptRuns(keep, folder, alone=True).by_arm(wanted)
    return found_of(runs), {
        "plans": {name: _facts(plan) for name, plan in plans.items()},
        "runs": plain_runs(runs),
    }


def in_turns(plans: Mapping[str, Plan], seeds: Sequence[int]) -> list[Wanted]:
    """The runs of all arms with each seed; with each seed a different arm comes first."""
    names = list(plans)
    return [
        Wanted(name, seed, _with_seed(plans[name], seed))
        for seed in seeds
        for name in (*names[seed % len(names) :], *names[: seed % len(names)])
    ]


def found_of(runs: Runs) -> dict[str, list[float]]:
    """All figures, by name, from runs of all arms over the same seeds."""
    accuracies = accuracies_of(runs)
    over = {
        arm: ratios(_seconds(runs[arm]), _seconds(runs["large"])) for arm in ARMS if arm != "large"
    }
    gains = {
        f"hybrid_over_{arm}_points": differences(accuracies["hybrid"], accuracies[arm])
        for arm in ("dual", "cyclic")
    }
    return {
        "hybrid_time_saved": [1 - one for one in over["hybrid"]],
        "hybrid_accuracy_points": differences(accuracies["hybrid"], accuracies["large"]),
        **gains,
        **{f"seconds_{arm}_over_large": some for arm, some in over.items()},
        **{f"accuracy_{arm}": some for arm, some in accuracies.items()},
    }


def _seconds(runs: Sequence[Run]) -> list[float]:
    return [one.seconds for one in runs]


# ------------------------------------------------------------------------------------------ plans


def _plans(data: Path, keep: Path, folder: Path) -> dict[str, Plan]:
    """The plan of each arm; plans kept in ``keep`` are reused for the images in ``data``."""
    source = f"cifar100:{data}"
    files = {name: keep / f"{name}.plan.json" for name in ARMS}
    if not all(file.exists() for file in files.values()):
        words = (
            f"network=resnet8 method=hybrid workers={WORKERS} device=cpu epochs={EPOCHS} "
            f"precision={quick_precision()} evaluate_epochs={EPOCHS} learning_rate=0.1 "
            f"base_batch=128 scaling=sqrt global_batch={WORKERS * LARGE_BATCH}"
        )
        probe = {"budget": PROBE_SECONDS, "learning": 0}
        job = job_from(words, data=source, resolutions=SIDES, dual=TWO_SIZES, probe=probe)
        say("probing")
        profile = verbs.probe(job)
        with ExitStack() as alive:
            for name, keys in ARMS.items():
                plan = _planned(profile, keys, folder / "pairs", alive)
                say(f"{name}: local batches {plan.stages[-1].local_batch_sizes}")
                write_record(plan, files[name])
    plans = {name: read_record(file, Plan) for name, file in files.items()}
    return {
        name: plan.model_copy(update={"job": plan.job.model_copy(update={"data": source})})
        for name, plan in plans.items()
    }


def _planned(profile: Profile, keys: Mapping[str, Any], folder: Path, alive: ExitStack) -> Plan:
    """The plan of an arm; two batch sizes are measured side by side until their rounds agree."""
    first = verbs.plan(profile, **keys)
    if not pairs_of(first):
        return first
    measure = alive.enter_context(pair_measurer_for(first, folder))
    return settle(first, profile, measure, lambda known: verbs.plan(known, **keys)).plan


def _with_seed(plan: Plan, seed: int) -> Plan:
    return plan.model_copy(update={"job": plan.job.model_copy(update={"seed": seed})})


def _facts(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "epochs": row.epochs,
            "resolution": row.resolution,
            "learning_rate": row.learning_rate,
            "local_batch_sizes": row.local_batch_sizes,
            "samples_per_round": row.samples_per_round,
            "update_factors": row.update_factors,
        }
        for row in plan.stages
    ]


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
