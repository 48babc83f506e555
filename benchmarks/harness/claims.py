"""The claims of the four papers behind the methods, and the figures that test them.

`benchmarks.harness.tables` makes docs/papers.md from them: the figures come from the kept reports,
and whether a claim holds is computed from them, not written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EACH = "each of the results"


@dataclass(frozen=True)
class Claim:
    """A claim, and the figures that test it.

    Attributes:
        words: The claim, with the paper's own figure where it has one.
        results: Figures ``BENCHMARK.FIGURE`` by label; the first one's benchmark gives command and
            scale.
        over: The claim holds if the first of these is above the second: figures, plain numbers, or
            `EACH`. Unset: it holds if the figures reach their goals.
        command: The command that tests the claim where no figure does: a test, or a command that
            nobody has run yet.
        outcome: The result of the command, where no figure has it; empty: nobody has run it here.
    """

    words: str
    results: Mapping[str, str] = field(default_factory=dict)
    over: tuple[str | float, str | float] | None = None
    command: str = ""
    outcome: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper, what it claims, and the benchmarks that are about it.

    Attributes:
        title: Title, as published.
        source: Authors, number and versions.
        known: The parts of the paper that this project's authors could read.
        claims: The claims in any order; in the table, misses come first.
        benchmarks: Benchmarks whose figures are all listed.
    """

    title: str
    source: str
    known: str
    claims: tuple[Claim, ...]
    benchmarks: tuple[str, ...]


SCALES: Mapping[str, str] = {
    "dual_batch": "CIFAR-100, 32 px, `resnet8`, two processes with a core each",
    "dual_accuracy": "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four virtual workers",
    "dual_uneven": "the same four workers, two with a tenth of the fixed time of a step",
    "update_factors": "the same four workers, two or three with the small batch, 1.1 times the "
    "time",
    "hybrid_virtual": "the same four workers, three with the small batch, 1.1 times the time, the "
    "rate in three stages",
    "hybrid": "12,288 images of CIFAR-100, 32 px, `resnet8`, 14 epochs, two processes with a core "
    "each",
    "cyclic": "CIFAR-100 (14 epochs) and Imagenette (21 epochs), `resnet8`, one worker",
    "data_path": "Imagenette, `resnet8`, one worker",
    "uneven": "CIFAR-100, `resnet8`, batch 128, two workers with a core each",
    "shares": "3,840 images of CIFAR-100 at 16 px, batch 128, two workers with a core each",
    "shared_cores": "7,680 images of CIFAR-100 at 16 px, `resnet8`, batch 256, four workers on two "
    "cores, three of them on one",
    "warmup": "20,000 images of CIFAR-100 at 16 px, `resnet8`, 18 epochs",
    "large_networks": "320 photographs at 224 px, 3 epochs, batches of 8 and 32, two workers of a "
    "core each",
    "warmup_long": "the same images, 48 epochs, base batch 4",
    "scaling_long": "the same images, 48 epochs, base batch 4, warm-up 5 epochs of 90",
    "predict": "three small networks, CIFAR-100 and Imagenette, one and two workers",
    "time_to_accuracy": "trainings of 10 to 117 s on five tasks, one worker or two",
    "large_batch": "four tasks of 5 to 10 epochs, batches 479 to 2,048",
    "gradient_scaling_long": "4,096 images of CIFAR-100 at 8 px, `resnet8` and `vgg8`, arms at "
    "their best rates",
    "batch_curves": "CIFAR-100, three small networks, two workers of a core each",
    "gradient_overhead": "`resnet8`, one worker",
}
"""By benchmark, its scale in a few words, for the table."""

SMALL_WORKERS = {2: "two", 3: "three"}
SHARES_NETWORKS = ("resnet8", "mobilenet_small")
SHARES_MERGES = {"sum": "summed", "average": "averaged"}

DUAL_BATCH = Paper(
    title="Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient Distributed Training",
    source="Kuan-Wei Lu, Ding-Yong Hong, Pangfeng Liu and Jan-Jan Wu; arXiv "
    "[2509.26092](https://arxiv.org/abs/2509.26092), v2 of 31 October 2025; v1 is called Efficient "
    "Distributed Training via Dual Batch Sizes and Cyclic Progressive Learning",
    known="The paper, and what its authors' published code does. Each of its accuracies is of a "
    "single run of ResNet-18",
    claims=(
        Claim(
            "Small batches, shares and update factors of tables 2 and 6, and those of eight "
            "workers, follow from the equations",
            command="python -m pytest tests/test_dual_batch.py",
            outcome="every row, truncated and rounded as there",
        ),
        Claim(
            "A round with two batch sizes takes k times one with large batches, within 0.02",
            {
                "k = 1.05": "dual_batch.round_over_large_k105",
                "k = 1.1": "dual_batch.round_over_large_k110",
            },
        ),
        Claim(
            "Both kinds of workers end a round together",
            {
                "longest less shortest over their mean": "dual_batch.finish_spread",
                "with equal batches": "dual_batch.equal_finish_spread",
            },
        ),
        Claim(
            "The server's exchange costs little of a round",
            {"": "dual_batch.server_share_of_round"},
        ),
        Claim(
            "Two batch sizes are more accurate than the large one alone (its table 5: +2.9 points, "
            "three small-batch workers, k = 1.1, over a baseline with 5 of 140 epochs warm-up from "
            "a fifth of the rate; here all have 1.2 of 12 from half of it)",
            {"": "dual_accuracy.dual_accuracy_gain"},
        ),
        Claim(
            "Two sizes are more accurate than one smaller batch for all, in the same time (its "
            "table 5: +0.2 points, three small-batch workers against four, k = 1.1)",
            {"": "dual_accuracy.dual_over_uniform_points"},
            over=("dual_accuracy.dual_over_uniform_points", 0.0),
        ),
        Claim(
            "Where fixed times of a step differ from worker to worker (ours), two sizes are more "
            "accurate than one smaller batch for all",
            {
                "1.02 times the time": "dual_uneven.two_over_uniform_points_102",
                "1.05 times": "dual_uneven.two_over_uniform_points_105",
            },
            over=(EACH, 0.0),
        ),
        Claim(
            "With most data on small-batch workers, three of four, accuracy is best (k = 1.1)",
            {
                "one": "dual_accuracy.accuracy_k110-1",
                "two": "dual_accuracy.accuracy_k110-2",
                "three": "dual_accuracy.accuracy_k110-3",
                "four": "dual_accuracy.accuracy_k110-4",
            },
            over=("dual_accuracy.accuracy_k110-3", "dual_accuracy.accuracy_k110-4"),
        ),
        Claim(
            "One worker with a very small batch is less accurate than two with a larger one (its "
            "table 5, k = 1.1: 68.5 for 70.5 %; by its authors' logs few of eight even lose)",
            {"one": "dual_accuracy.accuracy_k110-1", "two": "dual_accuracy.accuracy_k110-2"},
            over=("dual_accuracy.accuracy_k110-2", "dual_accuracy.accuracy_k110-1"),
        ),
        Claim(
            "The update factor d_S / d_L is more accurate than none (its table 3: +0.3 points "
            "with two small-batch workers, +0.9 with three, k = 1.1)",
            {
                f"{words} small": f"update_factors.points_over_none_{count}"
                for count, words in SMALL_WORKERS.items()
            },
            over=(EACH, 0.0),
        ),
        Claim(
            "Its held-out loss is lower with d_S / d_L than with none (its table 3: 0.045 lower "
            "with two small-batch workers, 0.084 with three; figure 5 draws it over the training)",
            {
                f"{words} small, {when}": f"update_factors.{name}_over_none_{count}"
                for count, words in SMALL_WORKERS.items()
                for name, when in (("loss", "last epoch"), ("losses", "mean of all epochs"))
            },
            over=(0.0, EACH),
        ),
        Claim(
            "All waiting for all (bsp) is no more accurate than asynchronous merging (its authors' "
            "logs: within about a point)",
            {
                "asp": "dual_accuracy.accuracy_k110-3",
                "ssp": "dual_accuracy.accuracy_ssp",
                "bsp": "dual_accuracy.accuracy_bsp",
            },
            over=("dual_accuracy.accuracy_k110-3", "dual_accuracy.accuracy_bsp"),
        ),
        Claim(
            "Cycling through resolutions saves time, CIFAR-100 (paper: 10.1 %, large batches with "
            "and without the cycle)",
            {"": "cyclic.cifar_time_saved"},
            over=("cyclic.cifar_time_saved", 0.101),
        ),
        Claim(
            "Cycling through resolutions loses less than a point of accuracy, CIFAR-100",
            {"": "cyclic.cifar_accuracy"},
            over=("cyclic.cifar_accuracy", -1.0),
        ),
        Claim(
            "Cycling through resolutions saves time, larger images (paper: 36.0 % on ImageNet, "
            "large batches with and without the cycle)",
            {"": "cyclic.folder_time_saved"},
            over=("cyclic.folder_time_saved", 0.36),
        ),
        Claim(
            "Cycling through resolutions loses less than a point of accuracy, larger images "
            "(trained at up to 80 px)",
            {"": "cyclic.folder_accuracy"},
            over=("cyclic.folder_accuracy", -1.0),
        ),
        Claim(
            "The cycle in each stage is more accurate than one pass over the training (later runs "
            "of its authors: 65.8 against 64.0 % on ImageNet)",
            {
                "cycle": "dual_accuracy.accuracy_cyclic",
                "one pass": "dual_accuracy.accuracy_one-pass",
            },
            over=("dual_accuracy.accuracy_cyclic", "dual_accuracy.accuracy_one-pass"),
        ),
        Claim(
            "The hybrid is more accurate than large batches (paper: +3.3 points, three of four "
            "workers with the small batch, k = 1.05; here k = 1.1)",
            {"": "hybrid_virtual.hybrid_accuracy_points"},
        ),
        Claim(
            "It is more accurate than two batch sizes alone, in simulated time (paper: +1.3 points "
            "with three of four small, k = 1.05)",
            {"": "hybrid_virtual.hybrid_over_dual_points"},
            over=("hybrid_virtual.hybrid_over_dual_points", 0.0),
        ),
        Claim(
            "The hybrid takes less time than large batches, simulated (paper: 8.9 % less with "
            "three of four small, k = 1.05, and 10.1 % with none; here three, k = 1.1)",
            {
                f"{words}, times the time": f"hybrid_virtual.seconds_{arm}_over_large"
                for arm, words in (
                    ("hybrid", "hybrid"),
                    ("dual", "two batch sizes alone"),
                    ("cyclic", "the cycle alone"),
                )
            },
            over=(1.0, "hybrid_virtual.seconds_hybrid_over_large"),
        ),
        Claim(
            "The hybrid takes less time than large batches, in real processes, CIFAR-100, half the "
            "workers with the small batch, k = 1.1 (paper, k = 1.05: 5.1 % so; 8.9 % with three of "
            "four, which is the goal here)",
            {"": "hybrid.hybrid_time_saved"},
        ),
        Claim(
            "It is more accurate than large batches, in real processes (paper: +3.0 points with "
            "half of them small)",
            {"": "hybrid.hybrid_accuracy_points"},
        ),
        Claim(
            "It is more accurate than two batch sizes alone, in real processes (paper: +1.0 points "
            "with half of them small)",
            {"": "hybrid.hybrid_over_dual_points"},
            over=("hybrid.hybrid_over_dual_points", 0.0),
        ),
        Claim(
            "The hybrid saves 34.8 % of the time on ImageNet (one of four workers with the small "
            "batch, 22,161 for 33,975 s, and 62.8 for 65.9 % accuracy; its own lines and "
            "equations give 32.6 %, and 35.8 % without small batches, where it measured 36.0). It "
            "needs ImageNet and GPUs",
            command="batchwright run method=hybrid workers=4 dual.small_workers=1 "
            "cycle.preset=imagenet data=imagefolder:PATH",
        ),
        Claim(
            "The fewer small-batch workers, the lower the loss (its table 5, k = 1.1: 1.193, "
            "1.250, 1.327, 1.415 with one to four)",
            {words: f"update_factors.loss_ratio_{count}" for count, words in SMALL_WORKERS.items()},
            over=("update_factors.loss_ratio_3", "update_factors.loss_ratio_2"),
        ),
        Claim(
            "A line in the batch gives the time of a step within 3.5 % (its table 4), and the "
            "largest batch that fits, with 3.5 to 3.7 % of the memory to spare (its section 5.3)",
            command="python -m benchmarks.gpu",
        ),
        Claim(
            "All of it as published: ResNet-18, CIFAR-100 in 140 epochs. It needs a GPU",
            command="python -m benchmarks.gpu --steps hybrid-3 large hybrid-0 dual-3",
        ),
    ),
    benchmarks=(
        *(
            "hybrid",
            "hybrid_virtual",
            "dual_batch",
            "dual_accuracy",
            "dual_uneven",
            "update_factors",
        ),
        *("cyclic", "data_path"),
    ),
)

DBS = Paper(
    title="DBS: Dynamic Batch Size For Distributed Deep Neural Network Training",
    source="Qing Ye, Yuhao Zhou, Mingjia Shi, Yanan Sun and Jiancheng Lv; arXiv "
    "[2007.11831](https://arxiv.org/abs/2007.11831), v2 of 3 November 2022; journal version IEEE "
    "TETCI 2022, doi 10.1109/TETCI.2022.3220224",
    known="The abstract, and what the published code does; its theorem and its tables of results "
    "were not available to us",
    claims=(
        Claim(
            "Shares by the times of the last epoch alone (`rebalance=published`) shorten epochs on "
            "uneven workers",
            {
                f"`{network}`": f"shares.published_over_equal_steady_sum_{network}"
                for network in SHARES_NETWORKS
            },
            over=(1.0, EACH),
        ),
        Claim(
            "Shares as published shorten epochs where models are averaged "
            "(`dual.shares=published`)",
            {
                f"`{network}`": f"shares.published_over_equal_steady_average_{network}"
                for network in SHARES_NETWORKS
            },
            over=(1.0, EACH),
        ),
        Claim(
            "Shares as published shorten epochs under a load that comes and goes (times equal "
            "shares' time)",
            {
                f"{words}, `{network}`": f"shares.published_over_equal_changing_{merge}_{network}"
                for merge, words in SHARES_MERGES.items()
                for network in SHARES_NETWORKS
            },
            over=(1.0, EACH),
        ),
        Claim(
            "Ours are quicker than the published ones (published over ours)",
            {
                f"{words}, {load}, `{net}`": f"shares.published_over_ours_{load}_{merge}_{net}"
                for merge, words in SHARES_MERGES.items()
                for load in ("steady", "changing")
                for net in SHARES_NETWORKS
            },
            over=(EACH, 1.0),
        ),
        Claim(
            "Shares as published shorten epochs where several workers share a core, as they share "
            "a GPU there (last two of four epochs, times equal shares' time; ideal: 0.67)",
            {way: f"shared_cores.{way}_over_equal_last" for way in ("published", "ours")},
            over=(1.0, "shared_cores.published_over_equal_last"),
        ),
        Claim(
            "Ours are quicker than the published ones where several workers share a core "
            "(published over ours)",
            {
                "last two epochs": "shared_cores.published_over_ours_last",
                "all four": "shared_cores.published_over_ours_counted",
            },
            over=(EACH, 1.0),
        ),
        Claim(
            "Shares made again once an epoch, otherwise ours, shorten epochs on uneven workers",
            {"times equal shares' time": "uneven.each_epoch_over_equal_shares"},
            over=(1.0, "uneven.each_epoch_over_equal_shares"),
        ),
        Claim(
            "Shares that follow every 25 steps, with a dead band and smoothed speeds (ours), do as "
            "much as half speed of one of two allows",
            {
                "times equal shares' time": "uneven.dynamic_over_equal_shares",
                "fixed shares of 85 and 43": "uneven.fixed_over_equal_shares",
            },
        ),
        Claim(
            "Ours are quicker than shares made again once an epoch",
            {
                "ours": "uneven.dynamic_over_equal_shares",
                "once an epoch": "uneven.each_epoch_over_equal_shares",
            },
            over=("uneven.each_epoch_over_equal_shares", "uneven.dynamic_over_equal_shares"),
        ),
        Claim(
            "Workers come to compute equally long",
            {"slowest over fastest": "uneven.slowest_over_fastest"},
        ),
        Claim(
            "The shares follow a load that comes and goes",
            {"": "uneven.recovery_intervals"},
        ),
        Claim(
            "Even workers lose nothing",
            {
                "times DistributedDataParallel's time": "uneven.even_dynamic_over_ddp_seconds",
            },
        ),
        Claim(
            "Accuracy is that of equal shares, to less than a point",
            {"": "uneven.accuracy_dynamic_less_equal"},
            over=("uneven.accuracy_dynamic_less_equal", -1.0),
        ),
        Claim(
            "Shares are made whole as in the example, 13.7, 16.5, 19.6, 14.2 of 64: 14, 16, 20, 14",
            command="python -m pytest tests/test_partition.py",
            outcome="exact; and the sum is the batch in every case",
        ),
        Claim(
            "The weighted gradient is that of one process",
            command="python -m pytest tests/test_reducer.py",
            outcome="to rounding",
        ),
        Claim(
            "Shares as published with ResNet-101, DenseNet-121, GoogLeNet and RegNet (several "
            "workers on one GPU, as there, are refused here: decision 71)",
            command="batchwright run method=dynamic-batch rebalance=published workers=4 "
            "network=torchvision:resnet101 data=cifar100:PATH",
        ),
    ),
    benchmarks=("uneven", "shares", "shared_cores"),
)

POSTER = Paper(
    title="Increasing Mini-Batch Size While Preserving Accuracy for Distributed Deep Learning",
    source="McCord (Middle Tennessee State University) and Dash (Oak Ridge National Laboratory); "
    "poster of the ACM Student Research Competition, SC21, November 2021",
    known="Its text; the accuracies are in figures. ResNet-50 on ImageNet, 90 epochs, batches of "
    "7,680 and about 30,000",
    claims=(
        Claim(
            "Some warm-up is better than none, 60 times the base batch",
            {"": "warmup.warmup_gain_points_960"},
            over=("warmup.warmup_gain_points_960", 0.0),
        ),
        Claim(
            "Some warm-up is better than none, 240 times the base batch",
            {"": "warmup.warmup_gain_points_3840"},
            over=("warmup.warmup_gain_points_3840", 0.0),
        ),
        *(
            Claim(
                f"Beyond the best warm-up accuracy falls{where} (20 of 90 epochs less the best)",
                {
                    "60 times": f"{name}.longest_over_best_points_{60 * base}",
                    "240 times": f"{name}.longest_over_best_points_{240 * base}",
                },
                over=(0.0, EACH),
            )
            for name, base, where in (
                ("warmup", 16, ""),
                ("warmup_long", 4, " in trainings of at least 1,000 steps"),
            )
        ),
        Claim(
            "The best warm-up is longer at the larger batch (paper: 5 and 10 of 90 epochs)",
            {
                "60 times": "warmup.warmup_best_epochs_960",
                "240 times": "warmup.warmup_best_epochs_3840",
            },
            over=("warmup.warmup_best_epochs_3840", "warmup.warmup_best_epochs_960"),
        ),
        Claim(
            "Linear scaling gains nothing over the rate not scaled",
            {
                "60 times": "warmup.scaled_over_unscaled_points_960",
                "240 times": "warmup.scaled_over_unscaled_points_3840",
            },
            over=(0.0, EACH),
        ),
        Claim(
            "Linear scaling gains nothing over the rate not scaled in trainings of at least 1,000 "
            "steps",
            {
                "60 times": "scaling_long.scaled_over_unscaled_points_240",
                "240 times": "scaling_long.scaled_over_unscaled_points_960",
            },
            over=(0.0, EACH),
        ),
        Claim(
            "Accuracy falls with the batch",
            {
                f"{batch / 16:g} times": f"warmup.accuracy_linear_{batch}"
                for batch in (60, 240, 960, 3840)
            },
            over=("warmup.accuracy_linear_60", "warmup.accuracy_linear_3840"),
        ),
        Claim(
            "Some warm-up is better than none in trainings of at least 1,000 steps",
            {
                "60 times": "warmup_long.warmup_gain_points_240",
                "240 times": "warmup_long.warmup_gain_points_960",
            },
            over=(EACH, 0.0),
        ),
        Claim(
            "The best warm-up is longer at the larger batch in trainings of at least 1,000 steps",
            {
                "60 times": "warmup_long.warmup_best_epochs_240",
                "240 times": "warmup_long.warmup_best_epochs_960",
            },
            over=("warmup_long.warmup_best_epochs_960", "warmup_long.warmup_best_epochs_240"),
        ),
    ),
    benchmarks=("warmup", "warmup_long", "scaling_long"),
)

TULA = Paper(
    title="Tula: Optimizing Time, Cost, and Generalization in Distributed Large-Batch Training",
    source="Sahil Tyagi and Feiyi Wang; arXiv [2603.18112](https://arxiv.org/abs/2603.18112), 18 "
    "March 2026",
    known="Abstract, outline and captions. The models of time and memory, the knee and adaptive "
    "gradient scaling (AGS) here are our own, after earlier papers of the same author and standard "
    "theory; the abstract names neither what 20 times is relative to nor how the large batch was "
    "tuned",
    claims=(
        Claim(
            "Time is predicted within 7.5 to 14 %, in the median: steps that were not probed",
            {
                "median": "predict.step_seconds_median_error",
                "largest": "predict.step_seconds_worst_error",
            },
            over=(0.14, "predict.step_seconds_median_error"),
        ),
        Claim(
            "Time of whole trainings is predicted within 7.5 to 14 %, in the median",
            {
                "median": "time_to_accuracy.training_seconds_error",
                "largest": "time_to_accuracy.training_seconds_worst",
            },
            over=(0.14, "time_to_accuracy.training_seconds_error"),
        ),
        Claim(
            "Cost of whole trainings is predicted within 7.5 to 14 %, in the median",
            {
                "median": "time_to_accuracy.training_cost_error",
                "largest": "time_to_accuracy.training_cost_worst",
            },
            over=(0.14, "time_to_accuracy.training_cost_error"),
        ),
        Claim(
            "Memory is predicted from a few batches (tensors, on the CPU)",
            {
                "median error": "predict.memory_median_error",
                "above its interval": "predict.memory_worst_under",
            },
        ),
        Claim(
            "The largest batch that fits a limit is known (tensors, on the CPU)",
            {
                "share of the limit": "predict.memory_at_most",
                "at 1.05 times the batch": "predict.memory_next_step",
            },
        ),
        Claim(
            "A probe takes no more than 2 % of the training, or 60 s (ours)",
            {"times what it may": "predict.probe_share"},
        ),
        Claim(
            "AGS is 9 points more accurate than large batches as usual",
            {"": "large_batch.ags_over_plain_points"},
        ),
        Claim(
            "AGS is more accurate than the same rate without its factors",
            {"": "large_batch.ags_over_its_rate_points"},
            over=("large_batch.ags_over_its_rate_points", 0.0),
        ),
        *(
            Claim(
                f"AGS is more accurate than the same large batch, each at its best rate, {steps:,} "
                "steps",
                {
                    f"batch {batch}": f"gradient_scaling_long.ags_over_plain_points_{batch}_{steps}"
                    for batch in (64, 256)
                },
                over=(EACH, 0.0),
            )
            for steps in (64, 256, 1024)
        ),
        Claim(
            "Muon (ours) is more accurate than SGD with the same large batch, each at its best "
            "rate, 1,024 steps",
            {
                f"batch {batch}": f"gradient_scaling_long.muon_over_plain_points_{batch}_1024"
                for batch in (64, 256)
            },
            over=(EACH, 0.0),
        ),
        Claim(
            "`optimizer=muon` (ours) is 9 points more accurate than large batches as usual",
            {"": "large_batch.muon_over_plain_points"},
            over=("large_batch.muon_over_plain_points", 9.0),
        ),
        Claim(
            "AGS costs little of a step",
            {"": "gradient_overhead.ags_overhead"},
        ),
        Claim(
            "AGS with both bounds at 1 is SGD to the bit, and factors stay within their bounds",
            command="python -m pytest tests/test_gradient_scaling.py",
            outcome="exact",
        ),
        Claim(
            "The knee is well below the fastest batch, and takes a few percent more than the least "
            "time",
            {
                "times the least": "batch_curves.knee_over_least",
                "share of that batch": "batch_curves.knee_over_fastest",
            },
        ),
        Claim(
            "Up to 20 times as quick, over a batch of 128 (ours: the two workers with 64 each)",
            {
                "times, predicted": "batch_curves.speedup_over_128",
                "measured": "batch_curves.measured_speedup_over_128",
            },
        ),
        Claim(
            "Steps along the curve of time against batch are predicted within 14 %, in the median",
            {"": "batch_curves.curve_error"},
        ),
        Claim(
            "Time of an epoch of ResNet-50, VGG-11, AlexNet and MobileNetV3 at 224 px is predicted "
            "within 10 %, in the median",
            {"": "large_networks.large_epoch_error"},
        ),
        Claim(
            "Their memory is predicted within 10 %, in the median",
            {"": "large_networks.large_memory_error"},
        ),
    ),
    benchmarks=(
        *("predict", "batch_curves", "large_networks", "time_to_accuracy", "large_batch"),
        *("gradient_scaling_long", "gradient_overhead"),
    ),
)

PAPERS = (DUAL_BATCH, DBS, POSTER, TULA)
