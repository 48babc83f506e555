"""What a large batch costs in accuracy at equal epochs, and what wins it back.

Four tasks, each with a small batch and one 15 to 32 times as large. One worker trains in one
process on one core, in bfloat16 where the processor computes in it (digits in float32). A large
batch goes through the network in 8 equal parts in every arm, so batch normalization sees an eighth
of it, and the norms of 8 partial gradients are known:

    task                network   side   training images  epochs  large and small batch
    digits              resnet8    8 px  all  1,437        5         479 and 32
    cifar-resnet8       resnet8   16 px      20,480        8       2,048 and 64
    cifar-vgg8          vgg8      16 px      20,480        8       1,024 and 64
    imagenette-resnet8  resnet8   64 px       1,920       10         960 and 32

The cifar tasks have CIFAR-100's 100 classes at half their side, to save time: some 230 runs are
made. imagenette2-160 is ten classes of ImageNet. Training images are drawn evenly over the
originals; all held-out images are evaluated, after the last epoch. SGD has Nesterov momentum 0.9
and weight decay 5e-4 on matrices and kernels. Its rate at the small batch stands in
`benchmarks.methods.large_batch_arms.TASKS`; it was fixed, with batches, epochs and images, before
any arm with AGS (adaptive gradient scaling) was run. No arm's rate is tuned at the large batch. All
arms have half a cosine; a warm-up takes a tenth of the epochs. Muon's default rates and the form of
AGS were chosen after trying these tasks with seeds 10 to 14.

    small-half, small, small-double    the small batch, SGD at half, once and twice its rate
    small-muon-half, small-muon, small-muon-double
                                       the small batch, Muon at half, once and twice its
                                       default rate
    unscaled, linear                   the large batch at the small batch's rate, or at that rate
                                       times the ratio of batches, no warm-up; the better one is
                                       called plain
    linear-warmup, sqrt-warmup         the rate scaled with the batch or its square root, warm-up
    lars                               peak rate 5, trust 0.001, warm-up (ResNet-50 of MLPerf 0.6 at
                                       batches below 8,192); vectors have SGD's rate, scaled the
                                       same way
    lamb                               peak rate 4/800 times the square root of batch / 512, decay
                                       0.01, warm-up (You et al. 2019, ResNet-50)
    adascale                           `scaling=gain`, no warm-up
    ags-norm, ags-gain                 `ags.mode` on top of square root scaling, together at most
                                       linear scaling, warm-up
    ags-gain-none                      `ags.mode=gain` on the unscaled rate, no warm-up
    muon                               `optimizer=muon` at its default rate, else a job's defaults
    picked                             a job that names task, batch and epochs, and nothing else
    picked-low, picked-high            the same plan with its rates divided and multiplied by the
                                       square root of 3

Figures are of test accuracy in points (hundredths of a share), over seeds 0 to 4, paired: the same
initial weights and order of images in all arms. For each seed the mean over the four tasks is
taken; the figure is the mean over the seeds with its 95 % interval, and goals apply to the mean.
All arms are made with seeds 0 and 1, which also choose the "best" arms, task by task. The arms that
differences are taken of continue with all seeds: the best small-batch arm of SGD and of Muon,
plain, the best untuned arm, `AGS_ARM` and the same without factors, muon and picked.

`ags` in the name of a figure is `AGS_ARM`. Its rate is that of sqrt-warmup, which is the same arm
without factors (added when two seeds of `AGS_ARM` had been seen). Untuned arms are unscaled,
linear, linear-warmup, sqrt-warmup, lars, lamb and adascale. The gap is the best small-batch SGD
minus plain. The spread of rates is the largest minus the smallest accuracy of the three picked
arms, with the seeds that all three have: mean and range over the tasks.

A run that ends because its gradients stay infinite counts as guessing.

--full makes some 230 runs of up to three minutes, two at a time on a core each. Seed 0 of all comes
first, and after each seed the figures so far are printed. --quick checks two arms of cifar-resnet8,
or of digits without --data. Other settings can be tried by
`benchmarks/tools/large_batch_look.py` of commit a7c9414d. LARS and LAMB need pytorch-optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness.benchmark import Arguments, Benchmark, Found, require, say
from benchmarks.harness.figures import Figure, differences, print_values
from benchmarks.harness.kept_runs import KeptRuns, Run, Runs, accuracies_of, plain_runs
from benchmarks.harness.plans import Opened
from benchmarks.methods.large_batch_arms import (
    CHOOSING_SEEDS,
    PICKED,
    PLAIN,
    SEEDS,
    SMALL,
    SMALL_MUON,
    TASKS,
    UNTUNED,
    arms_of,
    open_task,
    wanted,
)

AGS_ARM, WITHOUT_FACTORS = "ags-norm", "sqrt-warmup"
CHECKED = "unscaled", AGS_ARM

Accuracies = Mapping[str, Mapping[str, Sequence[float]]]
"""By task and arm, in percent, a value for each seed from 0 on."""

BENCHMARK = Benchmark(
    "large_batch",
    "Large batches",
    "Four tasks (digits, CIFAR-100 with `resnet8` and `vgg8`, Imagenette at 64 px), large batches "
    "of 479 to 2,048 against small ones of 32 and 64, equal epochs (5 to 10), five paired seeds; "
    "plain: SGD with the large batch, the better of an unscaled and a linearly scaled rate; "
    "small-batch SGD: the best of three rates; the gap: small-batch SGD minus plain",
    (
        Figure("ags_over_plain_points", "points", "interval", "accuracy with adaptive gradient "
               "scaling minus plain large-batch SGD", at_least=9.0),
        Figure("ags_least_over_plain_points", "points", "interval", "accuracy with adaptive "
               "gradient scaling minus plain large-batch SGD, on the task where it gains least",
               at_least=0.0),
        Figure("ags_over_best_untuned_points", "points", "interval", "accuracy with adaptive "
               "gradient scaling minus the best other way without tuning: linear or square root "
               "scaling, warm-up, LARS, LAMB, AdaScale", at_least=2.0),
        Figure("ags_over_its_rate_points", "points", "interval", "accuracy with adaptive gradient "
               "scaling minus the same rate without its factors"),
        Figure("gap_closed", "share", "interval", "share of the gap between plain large-batch SGD "
               "and small-batch SGD that adaptive gradient scaling closes", at_least=0.5),
        Figure("picked_gap_closed", "share", "interval", "share of the gap between plain "
               "large-batch SGD and small-batch SGD that the plan's own choice closes",
               at_least=0.95),
        Figure("picked_rate_spread_points", "points", "mean", "largest minus smallest accuracy of "
               "the plan's own choice where its rates differ by a factor of 3", at_most=2.0),
        Figure("picked_under_best_small_points", "points", "interval", "accuracy of small-batch "
               "training with the best optimizer minus the plan's own choice with the large batch"),
        Figure("muon_over_plain_points", "points", "interval",
               "accuracy with `optimizer=muon` minus plain large-batch SGD"),
        *(
            Figure(f"plain_loses_points_{task}", "points", "interval",
                   f"accuracy of small-batch SGD minus plain large-batch SGD: {words}",
                   at_least=10.0)
            for task, words in (
                ("digits", "digits, batch 32 against 479"),
                ("cifar-resnet8", "CIFAR-100 with `resnet8`, batch 64 against 2,048"),
                ("cifar-vgg8", "CIFAR-100 with `vgg8`, batch 64 against 1,024"),
                ("imagenette-resnet8", "Imagenette, batch 32 against 960"),
            )
        ),
        *(
            Figure(f"accuracy_{name}_{arm}", "%", "mean")
            for name, task in TASKS.items()
            for arm in arms_of(task)
        ),
    ),
    seeds=SEEDS,
    needs_data="full",
    copies=True,
)  # fmt: skip


# ------------------------------------------------------------------------------------------- runs


def measure(arguments: Arguments, folder: Path) -> Found:
    """Train all arms seed by seed; with --quick check two of one task."""
    if arguments.full:
        require("pytorch_optimizer")  # for LARS and LAMB
    runs = KeptRuns(arguments.keep, folder)
    if not arguments.full:
        return _checked(runs, arguments.data, folder)
    known = {name: open_task(task, arguments.data, folder) for name, task in TASKS.items()}
    made: dict[str, dict[str, list[Run]]] = {name: {} for name in TASKS}
    for seed in SEEDS:
        _add_round(made, runs, known, seed)
        found = found_of({task: accuracies_of(arms) for task, arms in made.items()})
        if seed < SEEDS[-1]:
            say(f"so far, seeds 0 to {seed}:")
            print_values(BENCHMARK.values(found).values())
    return found, {task: plain_runs(arms) for task, arms in made.items()}


def _add_round(
    made: dict[str, dict[str, list[Run]]], runs: KeptRuns, known: Mapping[str, Opened], seed: int
) -> None:
    """Make the runs of one seed, and add them to ``made``, by task and arm."""
    pairs = [
        (name, arm)
        for name in TASKS
        for arm in arms_of_round(name, accuracies_of(made[name]), seed)
    ]
    done = runs.make([wanted(name, TASKS[name], arm, seed, known[name]) for name, arm in pairs])
    for (name, arm), run in zip(pairs, done, strict=True):
        made[name].setdefault(arm, []).append(run)


def arms_of_round(task: str, so_far: Mapping[str, Sequence[float]], seed: int) -> list[str]:
    """The arms to make with a seed: all with a choosing seed, then those that figures compare."""
    arms = arms_of(TASKS[task])
    if seed in CHOOSING_SEEDS:
        return list(arms)
    best = {best_of(so_far, names) for names in (SMALL, SMALL_MUON, PLAIN, UNTUNED)}
    return [name for name in arms if name in best | {AGS_ARM, WITHOUT_FACTORS, "muon", "picked"}]


def _checked(runs: KeptRuns, data: Path | None, folder: Path) -> Found:
    name = "cifar-resnet8" if data is not None else "digits"
    known = open_task(TASKS[name], data, folder)
    pair: Runs = {arm: runs.make([wanted(name, TASKS[name], arm, 0, known)]) for arm in CHECKED}
    plain, ags = accuracies_of(pair).values()
    check = Figure(f"{name}_ags_over_unscaled_check", "points", "interval")
    return {check.name: check.of(differences(ags, plain))}, plain_runs(pair)


# ---------------------------------------------------------------------------------------- figures


def best_of(accuracies: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The arm with the highest mean over the seeds that choose."""
    seeds = len(CHOOSING_SEEDS)
    return max(names, key=lambda name: fmean(accuracies[name][:seeds]))


def found_of(accuracies: Accuracies) -> dict[str, list[float]]:
    """All figures, by name, from the accuracies of all tasks."""
    tasks = {}
    for task, arms in accuracies.items():
        small, muon = best_of(arms, SMALL), best_of(arms, SMALL_MUON)
        best = {
            "small": small,
            "best small": best_of(arms, (small, muon)),
            "plain": best_of(arms, PLAIN),
            "untuned": best_of(arms, UNTUNED),
        }
        tasks[task] = {**arms, **{name: arms[arm] for name, arm in best.items()}}

    def over(arm: str, other: str) -> list[list[float]]:
        return [differences(arms[arm], arms[other]) for arms in tasks.values()]

    def closed(arm: str) -> list[float]:
        gaps = [fmean(one) for one in over("small", "plain")]
        gained = zip(over(arm, "plain"), gaps, strict=True)
        return _means([[one / gap for one in some] for some, gap in gained])

    return {
        "ags_over_plain_points": _means(over(AGS_ARM, "plain")),
        "ags_least_over_plain_points": min(over(AGS_ARM, "plain"), key=fmean),
        "ags_over_best_untuned_points": _means(over(AGS_ARM, "untuned")),
        "ags_over_its_rate_points": _means(over(AGS_ARM, WITHOUT_FACTORS)),
        "gap_closed": closed(AGS_ARM),
        "picked_gap_closed": closed("picked"),
        "picked_rate_spread_points": [
            _spread([arms[name] for name in PICKED]) for arms in tasks.values()
        ],
        "picked_under_best_small_points": _means(over("best small", "picked")),
        "muon_over_plain_points": _means(over("muon", "plain")),
        **{
            f"plain_loses_points_{task}": lost
            for task, lost in zip(tasks, over("small", "plain"), strict=True)
        },
        **{
            f"accuracy_{task}_{arm}": list(some)
            for task, arms in accuracies.items()
            for arm, some in arms.items()
        },
    }


def _spread(arms: Sequence[Sequence[float]]) -> float:
    """Largest minus smallest mean accuracy of some arms, over the seeds that all have."""
    seeds = min(map(len, arms))
    means = [fmean(some[:seeds]) for some in arms]
    return max(means) - min(means)


def _means(tasks: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the tasks for each seed."""
    return [fmean(values) for values in zip(*tasks, strict=True)]


if __name__ == "__main__":
    BENCHMARK.run(measure, __doc__)
