"""What a large batch costs in accuracy at equal epochs, and what wins it back.

Four tasks, each with a small batch and one 15 to 32 times as large, one worker in one process on
one core, bfloat16 where the processor computes in it (digits in float32); a large batch goes
through the network in 8 equal parts in every arm, so batch normalization sees an eighth of it, and
norms of 8 partial gradients are at hand:

    digits              resnet8,  8 px, all  1,437 images,  5 epochs, batch 479 against 32
    cifar-resnet8       resnet8, 16 px,     20,480 images,  8 epochs, batch 2,048 against 64
    cifar-vgg8          vgg8,    16 px,     20,480 images,  8 epochs, batch 1,024 against 64
    imagenette-resnet8  resnet8, 64 px,      1,920 images, 10 epochs, batch 960 against 32

The CIFAR tasks are CIFAR-100's 100 classes at half their side, for the sake of the some 230 runs;
imagenette2-160 is ten classes of ImageNet. Training images are drawn evenly over the originals, all
held-out images are evaluated, after the last epoch. SGD has Nesterov momentum 0.9 and decay 5e-4 of
matrices and kernels; its rate at the small batch stands in
`benchmarks.methods.large_batch_arms.TASKS`, fixed with batches, epochs and images before any arm
with AGS was run. No arm's rate is tuned at the large batch. Half a cosine in all; a warm-up takes a
tenth of the epochs. Muon's default rates and the form of AGS were settled after looks at these
tasks with seeds 10 to 14.

    small-half, small, small-double    the small batch, SGD at half, once and twice that rate
    small-muon-half, small-muon, small-muon-double
                                       the small batch, Muon likewise around its default rate
    unscaled, linear                   the large batch at the small one's rate, or at as many times
                                       that as the batch, no warm-up; the better is called plain
    linear-warmup, sqrt-warmup         the rate scaled with the batch or its root, after a warm-up
    lars                               peak rate 5, trust 0.001, warm-up (ResNet-50 of MLPerf 0.6 at
                                       batches below 8,192); vectors at SGD's rate, scaled alike
    lamb                               peak rate 4/800 times the root of batch / 512, decay 0.01,
                                       warm-up (You et al. 2019, ResNet-50)
    adascale                           `scaling=gain`, no warm-up
    ags-norm, ags-gain                 `ags.mode` on top of sqrt scaling, both together within
                                       linear scaling, after a warm-up
    ags-gain-none                      the same on a rate that is not scaled besides, no warm-up
    muon                               `optimizer=muon` at its default rate, otherwise as a job has
                                       it
    picked                             a job that names task, batch and epochs and nothing else
    picked-low, picked-high            the same plan with its rates over and times the root of 3

Figures are of test accuracy in points (hundredths of a share), over seeds 0 to 4, paired: the same
first weights and order of images in all arms. For each seed the mean over the four tasks is taken;
mean over the seeds and its 95 % interval are given, and goals are on the mean. All arms are made
with seeds 0 and 1, which also say which is "best", task by task; what differences are taken of
goes on with all seeds: the best small-batch arm of SGD and of Muon, plain, the best untuned one,
`AGS_ARM` and the same without factors, muon and picked.

    ags_over_plain_points           the AGS arm called `AGS_ARM` less plain; at least 9
    ags_least_over_plain_points     the same on the task where it gains least; at least 0
    ags_over_best_untuned_points    less the best of unscaled, linear, linear-warmup, sqrt-warmup,
                                    lars, lamb and adascale; at least 2
    ags_over_its_rate_points        less sqrt-warmup, which is the same without factors (added when
                                    two seeds of it had been seen)
    gap_closed                      share of the way from plain to the best small-batch SGD; at
                                    least half
    picked_gap_closed               the same for picked; at least 0.95
    picked_rate_spread_points       largest less smallest of the three picked arms with the seeds
                                    that all have, mean and range over the tasks; at most 2
    picked_under_best_small_points  the best small batch with SGD or Muon less picked
    muon_over_plain_points          muon less plain
    plain_loses_points_TASK         the best small-batch SGD less plain; at least 10
    accuracy_TASK_ARM               mean and range

A run that ends because its gradients stay infinite counts as guessing.

--full measures everything, and keeps the report in benchmarks/results: some 230 runs of up to three
minutes, two at a time on a core each. Seed 0 of everything comes first, and after each seed the
figures so far are printed. --keep DIR keeps each finished run there, and goes on from what is
there. --quick copies the figures from the newest kept report and runs two arms with seed 0 again as
a check: of cifar-resnet8, or of digits without --data. Other settings can be tried by
`python -m benchmarks.tools.large_batch_look`. LARS and LAMB need the package pytorch-optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.harness.common import (
    Arguments,
    Figure,
    Measurements,
    difference_figure,
    interval_figure,
    kept_figures,
    mean_figure,
    print_figures,
    run_benchmark,
    say,
)
from benchmarks.harness.kept_runs import KeptRuns, Run
from benchmarks.methods.large_batch_arms import (
    CHOOSING_SEEDS,
    PICKED,
    PLAIN,
    SEEDS,
    SMALL,
    SMALL_MUON,
    TASKS,
    UNTUNED,
    Opened,
    arms_of,
    open_task,
    wanted,
)

AGS_ARM, WITHOUT_FACTORS = "ags-norm", "sqrt-warmup"
CHECKED = "unscaled", AGS_ARM
LEAST_GAP = 10.0  # points that plain training must lose for a task to count
GOALS = {
    "ags_over_plain_points": 9.0,
    "ags_least_over_plain_points": 0.0,
    "ags_over_best_untuned_points": 2.0,
    "gap_closed": 0.5,
    "picked_gap_closed": 0.95,
}
MOST_RATE_SPREAD = 2.0  # points

Runs = Mapping[str, Sequence[Run]]
"""Of one task: by arm, a run for each seed from 0 on."""
Accuracies = Mapping[str, Mapping[str, Sequence[float]]]
"""By task and arm, in percent, a value for each seed from 0 on."""


def main() -> None:
    """Measure, print, and write the report."""
    run_benchmark("large_batch", __doc__, _measure, full_seeds=SEEDS)


# ------------------------------------------------------------------------------------------- runs


def _measure(arguments: Arguments, folder: Path) -> tuple[list[Figure], Measurements]:
    runs = KeptRuns(arguments.keep or folder / "kept", folder)
    if not arguments.full:
        return _checked(runs, arguments.data, folder)
    if arguments.data is None:
        raise SystemExit("benchmarks.methods.large_batch --full needs --data DIR, see --help")
    opened = {name: open_task(task, arguments.data, folder) for name, task in TASKS.items()}
    found: dict[str, dict[str, list[Run]]] = {name: {} for name in TASKS}
    for seed in SEEDS:
        _add_round(found, runs, opened, seed)
        if seed < SEEDS[-1]:
            say(f"so far, seeds 0 to {seed}:")
            print_figures(figures_of(accuracies_of(found)))
    measurements = {
        task: {arm: [run.__dict__ for run in some] for arm, some in arms.items()}
        for task, arms in found.items()
    }
    return figures_of(accuracies_of(found)), measurements


def _add_round(
    found: dict[str, dict[str, list[Run]]],
    runs: KeptRuns,
    opened: Mapping[str, Opened],
    seed: int,
) -> None:
    """Make the runs of one seed, and add them to what was ``found`` with those before."""
    pairs = [
        (name, arm) for name in TASKS for arm in arms_of_round(name, accuracies_of(found), seed)
    ]
    made = runs.make([wanted(name, TASKS[name], arm, seed, opened[name]) for name, arm in pairs])
    for (name, arm), run in zip(pairs, made, strict=True):
        found[name].setdefault(arm, []).append(run)


def arms_of_round(task: str, so_far: Accuracies, seed: int) -> list[str]:
    """The arms that are made with a seed: in later rounds those that differences are taken of."""
    arms = arms_of(TASKS[task])
    if seed in CHOOSING_SEEDS:
        return list(arms)
    best = {best_of(so_far[task], names) for names in (SMALL, SMALL_MUON, PLAIN, UNTUNED)}
    return [name for name in arms if name in best | {AGS_ARM, WITHOUT_FACTORS, "muon", "picked"}]


def _checked(runs: KeptRuns, data: Path | None, folder: Path) -> tuple[list[Figure], Measurements]:
    name = "cifar-resnet8" if data is not None else "digits"
    opened = open_task(TASKS[name], data, folder)
    plain, ags = runs.make([wanted(name, TASKS[name], arm, 0, opened) for arm in CHECKED])
    check = difference_figure(
        f"{name}_ags_over_unscaled_check", [ags.accuracy], [plain.accuracy], "points", margin=0.0
    )
    return [*kept_figures("large_batch", names_of_figures()), check], {
        arm: run.__dict__ for arm, run in zip(CHECKED, (plain, ags), strict=True)
    }


# ---------------------------------------------------------------------------------------- figures


def accuracies_of(found: Mapping[str, Runs]) -> Accuracies:
    """The accuracies of all runs."""
    return {
        task: {arm: [run.accuracy for run in some] for arm, some in arms.items()}
        for task, arms in found.items()
    }


def best_of(accuracies: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The arm with the highest mean over the seeds that choose."""
    seeds = len(CHOOSING_SEEDS)
    return max(names, key=lambda name: fmean(accuracies[name][:seeds]))


def names_of_figures() -> list[str]:
    """All that a full run gives."""
    return [
        *GOALS,
        "ags_over_its_rate_points",
        "picked_rate_spread_points",
        "picked_under_best_small_points",
        "muon_over_plain_points",
        *(f"plain_loses_points_{task}" for task in TASKS),
        *(f"accuracy_{name}_{arm}" for name, task in TASKS.items() for arm in arms_of(task)),
    ]


def figures_of(accuracies: Accuracies) -> list[Figure]:
    """The figures, from accuracies of all tasks."""
    chosen = {task: _Chosen(arms) for task, arms in accuracies.items()}

    def over(arm: str, other: str) -> list[float]:
        return _means([one.less(arm, other) for one in chosen.values()])

    def closed(arm: str) -> list[float]:
        shares = []
        for one in chosen.values():
            gap = fmean(one.less("small", "plain"))
            shares.append([gained / gap for gained in one.less(arm, "plain")])
        return _means(shares)

    least = min((one.less(AGS_ARM, "plain") for one in chosen.values()), key=fmean)
    values = {
        "ags_over_plain_points": over(AGS_ARM, "plain"),
        "ags_least_over_plain_points": least,
        "ags_over_best_untuned_points": over(AGS_ARM, "untuned"),
        "gap_closed": closed(AGS_ARM),
        "picked_gap_closed": closed("picked"),
    }
    return [
        *(
            interval_figure(name, some, _unit(name), at_least=GOALS[name])
            for name, some in values.items()
        ),
        interval_figure("ags_over_its_rate_points", over(AGS_ARM, WITHOUT_FACTORS), "points"),
        mean_figure(
            "picked_rate_spread_points",
            [one.spread(PICKED) for one in chosen.values()],
            "points",
            at_most=MOST_RATE_SPREAD,
        ),
        interval_figure("picked_under_best_small_points", over("best small", "picked"), "points"),
        interval_figure("muon_over_plain_points", over("muon", "plain"), "points"),
        *(
            interval_figure(
                f"plain_loses_points_{task}",
                one.less("small", "plain"),
                "points",
                at_least=LEAST_GAP,
            )
            for task, one in chosen.items()
        ),
        *(
            mean_figure(f"accuracy_{task}_{arm}", some, "%")
            for task, arms in accuracies.items()
            for arm, some in arms.items()
        ),
    ]


class _Chosen:
    """The arms of one task, with the best of some under names of their own."""

    def __init__(self, accuracies: Mapping[str, Sequence[float]]) -> None:
        small, muon = best_of(accuracies, SMALL), best_of(accuracies, SMALL_MUON)
        best = {
            "small": small,
            "best small": best_of(accuracies, (small, muon)),
            "plain": best_of(accuracies, PLAIN),
            "untuned": best_of(accuracies, UNTUNED),
        }
        self._accuracies = {
            **accuracies,
            **{name: accuracies[arm] for name, arm in best.items()},
        }

    def less(self, arm: str, other: str) -> list[float]:
        """Accuracy of one arm less that of another, seed by seed, in points."""
        pairs = zip(self._accuracies[arm], self._accuracies[other], strict=True)
        return [one - two for one, two in pairs]

    def spread(self, names: Sequence[str]) -> float:
        """Largest less smallest mean of some arms, over the seeds that all have, in points."""
        seeds = min(len(self._accuracies[name]) for name in names)
        means = [fmean(self._accuracies[name][:seeds]) for name in names]
        return max(means) - min(means)


def _means(tasks: Sequence[Sequence[float]]) -> list[float]:
    """For each seed the mean over the tasks."""
    return [fmean(values) for values in zip(*tasks, strict=True)]


def _unit(name: str) -> str:
    return "points" if name.endswith("points") else "share"


if __name__ == "__main__":
    main()
