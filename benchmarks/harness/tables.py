"""Puts the newest kept results into the documents: ``python -m benchmarks.harness.tables``.

Reads the newest report of each benchmark in ``benchmarks/results`` and replaces what stands between
the two comments ``<!-- figures ... -->`` and ``<!-- /figures -->``: in the README a few of them in
one table, in ``docs/measured.md`` all. With ``--check`` nothing is written; the exit code is 1 if a
document is out of step.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- figures: .*? -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
NOTHING = "No result has been kept yet."
HEAD = ("| figure | measured (spread) | goal | met |", "|---|---|---|---|")

HEADLINES = (
    (
        "time_to_accuracy",
        "time_to_accuracy_all",
        "seconds of a script as people write it over those of `batchwright run` to the same "
        "accuracy, where the script takes ten minutes or more",
    ),
    ("time_to_accuracy", "time_to_accuracy_short", "the same where it takes less"),
    ("first_contact", "own_data_epoch_error", "data and network of one's own: error of an epoch"),
    ("first_contact", "own_data_coverage", "such epochs inside the predicted 95 % interval"),
    ("first_contact", "precision_regret", "chosen number format's time over the other's, worst"),
    ("first_contact", "first_command_seconds", "`batchwright run` with its defaults (digits)"),
    ("first_contact", "explained_share", "share of it that its table of times explains"),
    ("first_contact", "busy_told", "probes beside busy programs that say so"),
    ("cyclic", "cifar_time_saved", "`cyclic`, CIFAR-100: training time saved"),
    ("cyclic", "cifar_accuracy", "accuracy less that of the top resolution throughout"),
    ("cyclic", "folder_time_saved", "`cyclic`, photographs up to 160 px: training time saved"),
    ("dual_accuracy", "dual_accuracy_gain", "`dual-batch`: accuracy less that of the large batch"),
    ("dual_accuracy", "dual_over_uniform_points", "the same less one smaller batch for all"),
    (
        "dual_uneven",
        "two_over_uniform_points_102",
        "the same where fixed times of a step differ from worker to worker",
    ),
    (
        "large_batch",
        "picked_gap_closed",
        "large batches: gap to SGD with small ones that the plan's choice (Muon) closes",
    ),
    ("large_batch", "muon_over_plain_points", "Muon: accuracy less SGD with the large batch"),
    ("large_batch", "ags_over_plain_points", "gradient scaling (SGD): the same"),
    ("large_batch", "ags_over_its_rate_points", "gradient scaling: less the rate without it"),
    (
        "large_batch",
        "picked_under_best_small_points",
        "small batches with the better optimizer: accuracy less the plan's choice",
    ),
    ("service", "records_lost", "records that the service lost in 20 kills"),
    ("service", "page_seconds_million_records", "page of a run with a million records"),
)
"""Benchmark, figure, and its words, in the README's order; what was never kept is left out."""

TITLES = {
    "time_to_accuracy": "Time to an accuracy",
    "main_job": "One worker, and the first command",
    "predict": "Predictions",
    "uneven": "Uneven workers, and kills",
    "dual_batch": "Two batch sizes at once: time",
    "dual_accuracy": "Two batch sizes at once: accuracy",
    "dual_uneven": "Two batch sizes at once: where fixed times differ",
    "cyclic": "Low resolutions first",
    "data_path": "The way from files to batches",
    "large_batch": "Large batches",
    "warmup": "Warm-up and the rule for the rate",
    "gradient_overhead": "What measuring gradients costs",
    "step_overhead": "What a step costs beside its computing",
    "first_contact": "Data and a network of one's own",
    "service": "The service",
}

MEANINGS = {
    "time_to_accuracy": {
        "time_to_accuracy_all": "script's seconds over those of `batchwright run` to the accuracy "
        "that the script reached, everything counted, tasks where the script takes ten minutes or "
        "more",
        "time_to_accuracy_short": "the same where it takes less",
        "time_to_accuracy_training": "the same over all tasks, without probe and trials",
        "time_to_accuracy_least": "the task with the least of these ratios",
        "time_to_accuracy_missed": "goals that the first command did not reach",
        "time_to_accuracy_uneven": "the ratio beside a program that never waits on one of the "
        "cores, two short tasks",
        "ratio_groups-resnet8": "the ratio for 25,000 images of CIFAR-100 in ten groups, `resnet8`",
        "ratio_imagenette-64": "Imagenette at 64 px, `resnet8`",
        "ratio_groups-vgg8": "25,000 images of CIFAR-100 in ten groups, `vgg8`",
        "ratio_cifar-resnet8": "CIFAR-100, `resnet8`",
        "ratio_imagenette-96": "Imagenette at 96 px, `resnet8`",
        "training_seconds_error": "predicted against measured seconds of these whole trainings, "
        "median error",
        "training_seconds_worst": "the largest of these errors",
        "training_cost_error": "the same of cost, median error",
        "training_cost_worst": "the largest of these errors",
        "resident_memory_error": "the same of the largest resident size of a worker, median error",
    },
    "first_contact": {
        "own_data_epoch_error": "predicted against measured seconds of an epoch, JPEG files and "
        "tensors through a data set of one's own, one and two workers, median error",
        "own_data_worst_error": "the largest of these errors",
        "own_data_coverage": "share of these epochs inside the 95 % interval",
        "own_data_without_loading": "the error for JPEG files if steps had their images at hand",
        "own_data_noise_ratio": "gradient noise scale of the probe over that of the first epoch",
        "precision_regret": "step time of the number format that was chosen over the other's, five "
        "networks on two forms of data, the largest",
        "precision_regret_median": "the same, median",
        "first_command_seconds": "`batchwright run` on digits, from the shell",
        "explained_share": "share of these seconds that the run's report tells of",
        "busy_told": "probes beside busy programs that say so",
        "quiet_called_busy": "probes alone that say so",
    },
    "main_job": {
        "session_over_bare": "our loop over a plain PyTorch loop written by hand on the same data "
        "in memory, images/s",
        "over_resident_batch": "our loop over the same steps on one batch that is already there, "
        "images/s",
        "over_lightning": "our loop over Lightning as started by default (two loader processes, "
        "float32), images/s",
        "over_accelerate": "our loop over accelerate with the same loader, images/s",
        "over_lightning_auto": "the same over Lightning, ours with `precision=auto`, images/s",
        "auto_accuracy": "accuracy of `precision=auto` less that of float32, paired seeds",
        "digits_accuracy": "held-out accuracy of `batchwright run` with its defaults (digits)",
        "main_job_seconds": "wall time of that command",
    },
    "predict": {
        "step_seconds_median_error": "predicted step time against measured, steps that were not "
        "probed, median error",
        "step_seconds_worst_error": "the largest of these errors",
        "repeat_error": "how far two measurements of one step were apart, the largest",
        "interval_coverage": "share of these steps inside the 95 % interval",
        "interval_half_width": "half that interval, as a share of the prediction",
        "memory_median_error": "predicted peak memory against measured, median error",
        "memory_worst_under": "how far a peak was above its interval, the largest (negative: "
        "below)",
        "epochs_to_target_error": "predicted epochs to an accuracy at three batches, largest error",
        "plan_10000_workers_seconds": "planning for 10,000 workers of five kinds",
    },
    "uneven": {
        "dynamic_over_equal_shares": "epoch time of `dynamic-batch` over equal shares, one of two "
        "workers at half speed, third epoch (limit: 0.67)",
        "fixed_over_equal_shares": "the same with fixed shares of 85 and 43: what can be reached",
        "slowest_over_fastest": "compute time of the slower worker over the other's, "
        "`dynamic-batch`",
        "recovery_intervals": "rebalancing intervals until the step time is within 10 % of ideal, "
        "after a load starts or ends, the largest",
        "four_workers_dynamic_over_equal_shares": "epoch time over equal shares, one of four "
        "workers at half speed by an injected slowdown (limit: 0.57)",
        "even_dynamic_over_ddp_seconds": "even workers: time of `dynamic-batch` over a "
        "DistributedDataParallel loop written by hand",
        "one_worker_over_bare_images": "one worker: our loop over a plain loop written by hand, "
        "images/s",
        "two_workers_over_ddp_images": "two workers: our loop over the DistributedDataParallel "
        "loop, images/s",
        "kills_recovered": "kills of a worker at random moments after which the run went on",
        "samples_lost_or_repeated": "samples lost or repeated in these runs",
        "seconds_lost_per_kill": "time that a kill costs",
        "accuracy_dynamic_less_equal": "accuracy of `dynamic-batch` under a load less that of "
        "equal shares, batch normalization, paired seeds",
    },
    "dual_batch": {
        "round_over_large_k105": "round with two batch sizes over one with the large batch alone, "
        "planned for 1.05",
        "round_over_large_k110": "the same, planned for 1.1",
        "finish_spread": "longest less shortest round of the two workers over their mean",
        "equal_finish_spread": "the same of two workers with equal batches: the machine's own part",
        "server_share_of_round": "push, merge and pull as a share of a round",
        "pushes_per_second_2": "pushes of an 11-million-parameter model by two processes",
        "pushes_per_second_4": "the same by four",
        "pushes_per_second_8": "the same by eight",
    },
    "cyclic": {
        "cifar_time_saved": "training time saved by cycling through 24 and 32 px, equal epochs, "
        "CIFAR-100",
        "cifar_time_saved_with_evaluation": "the same with the evaluation after each epoch",
        "cifar_accuracy": "accuracy less that of 32 px throughout, paired seeds",
        "folder_time_saved": "training time saved by cycling through 88, 124 and 160 px, image "
        "folder",
        "folder_time_saved_with_evaluation": "the same with the evaluation after each epoch",
        "folder_accuracy": "accuracy less that of 160 px throughout, paired seeds",
    },
    "data_path": {
        "low_over_top_images": "training at 88 px over training at 160 px, images/s (limit: 3.31)",
        "loader_over_pil": "images out of large JPEG files over a usual Pillow loader, images/s",
    },
    "dual_accuracy": {
        "dual_accuracy_gain": "accuracy with two batch sizes less that with the large one alone, "
        "the best number of small-batch workers, paired seeds",
        "dual_over_uniform_points": "the same less one smaller batch for all, in the same time",
        "hybrid_accuracy_gain": "accuracy of `hybrid` less that of large batches in the same "
        "stages of the rate",
        "accuracy_large": "accuracy of large batches alone",
        "accuracy_k105-1": "one of four with the small batch, 1.05 times the time",
        "accuracy_k105-2": "two",
        "accuracy_k105-3": "three",
        "accuracy_k105-4": "all four, so one smaller batch for all",
        "accuracy_k110-1": "one of four with the small batch, 1.1 times the time",
        "accuracy_k110-2": "two",
        "accuracy_k110-3": "three",
        "accuracy_k110-4": "all four, so one smaller batch for all",
        "accuracy_sqrt": "the best of one to three, `server.update_factor=sqrt`, not `ratio`",
        "accuracy_none": "the same with `none`",
        "accuracy_bsp": "the same with `server.consistency=bsp` in place of `asp`",
        "accuracy_ssp": "the same with `ssp`, three rounds ahead at most",
        "accuracy_large-stages": "large batches, the rate in three stages, 16 px",
        "accuracy_cyclic": "`cyclic`: the same, 12 and 16 px in each stage",
        "accuracy_one-pass": "the same, 12 px first, then 16 px",
        "accuracy_hybrid": "`hybrid`: as `cyclic`, with the batches of the best of one to three",
    },
    "dual_uneven": {
        "two_over_uniform_points_102": "accuracy with two batch sizes, the small one where steps "
        "cost a tenth, less one smaller batch for all, in 1.02 times the time",
        "two_over_uniform_points_105": "the same in 1.05 times the time",
        "two_over_large_points_102": "two sizes less the large batch alone, 1.02 times the time",
        "two_over_large_points_105": "the same in 1.05 times the time",
        "accuracy_two-102": "accuracy with two sizes, 1.02 times the time",
        "accuracy_uniform-102": "with one smaller batch for all, 1.02 times the time",
        "accuracy_two-105": "with two sizes, 1.05 times the time",
        "accuracy_uniform-105": "with one smaller batch for all, 1.05 times the time",
    },
    "large_batch": {
        "ags_over_plain_points": "test accuracy with adaptive gradient scaling less plain training "
        "with the large batch",
        "ags_least_over_plain_points": "the same on the task where it gains least",
        "ags_over_best_untuned_points": "the same less the best other way without tuning: linear "
        "or sqrt scaling, warm-up, LARS, LAMB, AdaScale",
        "ags_over_its_rate_points": "the same less the same rate without factors",
        "gap_closed": "share of the gap to small-batch training that it closes",
        "picked_gap_closed": "the same for what the plan picks by itself",
        "picked_rate_spread_points": "what a factor of 3 in its base rate changes",
        "picked_under_best_small_points": "small-batch training with the best optimizer less what "
        "the plan picks",
        "muon_over_plain_points": "`optimizer=muon` less plain",
        "plain_loses_points_digits": "small-batch SGD less plain: digits, 479 against 32",
        "plain_loses_points_cifar-resnet8": "CIFAR-100 with `resnet8`, 2,048 against 64",
        "plain_loses_points_cifar-vgg8": "CIFAR-100 with `vgg8`, 1,024 against 64",
        "plain_loses_points_imagenette-resnet8": "Imagenette, 960 against 32",
    },
    "warmup": {
        "warmup_best_epochs_960": "warm-up with the best mean accuracy at batch 960, in epochs of "
        "90; spread: those within one standard error of it",
        "warmup_best_epochs_3840": "the same at batch 3,840",
        "warmup_gain_points_960": "accuracy with the best warm-up above 0 less that with none, "
        "batch 960",
        "warmup_gain_points_3840": "batch 3,840",
        "scaled_over_unscaled_points_60": "accuracy with linear scaling less that with none, "
        "batch 60",
        "scaled_over_unscaled_points_240": "batch 240",
        "scaled_over_unscaled_points_960": "batch 960",
        "scaled_over_unscaled_points_3840": "batch 3,840",
        "accuracy_linear_60": "accuracy with linear scaling, batch 60",
        "accuracy_linear_240": "batch 240",
        "accuracy_linear_960": "batch 960",
        "accuracy_linear_3840": "batch 3,840",
    },
    "gradient_overhead": {
        "noise_scale_overhead": "what measuring the gradient noise scale adds to a step",
        "ags_overhead": "what adaptive gradient scaling adds to a step",
    },
    "step_overhead": {
        "step_overhead_us_per_tensor": "processor time of `session.step` for each tensor, backward "
        "pass and update left out, two workers, 160 tensors",
        **{
            f"{arm}_us_per_tensor_{workers}_{tensors}": f"{words}, {workers} worker(s), "
            f"{tensors} tensors"
            for workers in (1, 2)
            for tensors in (20, 160, 640)
            for arm, words in (("step", "the same"), ("ddp", "DistributedDataParallel"))
        },
    },
    "service": {
        "records_lost": "records acknowledged and not stored as they were sent, the service killed "
        "ten times on each database",
        "records_doubled": "records stored twice in these runs",
        "records_per_second_sqlite": "records taken in from 64 reporters, SQLite",
        "records_per_second_postgresql": "the same, PostgreSQL",
        "p99_seconds": "99 of 100 of these requests of 100 records are answered within",
        "page_seconds_million_records": "page or API answer of a run with a million records",
        "live_update_worst_seconds": "from a line in the run folder until the run's page in a "
        "browser shows it, the longest of 20",
        "fuzz_server_errors": "requests made up from the description that end in a server error or "
        "an undeclared answer",
    },
}
"""What a figure is, for a reader; figures without a line here are left out."""

REMARKS = {
    "time_to_accuracy": "A loop written by hand and Lightning, each with its best number of loader "
    "processes and SGD at the best of three rates, whichever is better; `batchwright run` has the "
    "script's last accuracy as `goal.accuracy`; spread: range over the seeds, quartiles for errors",
    "first_contact": "Spread: quartiles over the cases; of the largest, and of shares, that one "
    "value",
    "main_job": "Ratios compare arms that took turns in one run. CIFAR-100, `resnet8`, batch 128, "
    "one worker, unless said otherwise",
    "predict": "`resnet8`, `vgg8` and `mobilenet_small` on CIFAR-100 and Imagenette, one and two "
    "workers; spread: quartiles for medians, else from the median to the extreme",
    "uneven": "CIFAR-100, `resnet8`, global batch 128, each worker with one thread on a core of "
    "its own; a burner process takes half of one core",
    "dual_batch": "CIFAR-100, `resnet8`, one worker with local batch 500 and one with a small "
    "batch, a core each, and the parameter server besides",
    "cyclic": "`resnet8`, one worker, stages of the learning rate in the published proportions",
    "data_path": "imagenette2-160, `resnet8`, one worker; JPEG files of 500 x 375 px",
    "dual_accuracy": "CIFAR-100 at 16 px, `resnet8`, 12 epochs, four workers of a virtual cluster "
    "with the published times of a step; five paired seeds for the first three figures and what "
    "they compare, two for the rest; spread of an accuracy: least and most",
    "dual_uneven": "The same, where two of the four workers have a tenth of the fixed time of a "
    "step",
    "large_batch": "Four tasks (digits, CIFAR-100 with `resnet8` and `vgg8`, Imagenette at 64 px), "
    "batches 479 to 2,048 against 32 and 64, equal epochs (5 to 10), five paired seeds; plain: the "
    "better of a rate that is not scaled and one that is scaled linearly; small-batch SGD: the "
    "best of three rates",
    "warmup": "The warm-up poster's figures (ResNet-50 on ImageNet, 90 epochs) drawn again: 20,000 "
    "images of CIFAR-100 at 16 px, `resnet8`, 18 epochs, rate 0.0125 at batch 16, a tenth at 1/3, "
    "2/3 and 8/9 of them; five paired seeds for warm-ups, three for the rule",
    "gradient_overhead": "`resnet8` on one worker; arms took turns in one run",
    "step_overhead": "Tensors of 8 numbers; arms took turns within each step; time of the worker's "
    "own thread",
    "service": "Reporters and service share the two cores",
}


def newest(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The report of a benchmark's latest full run; `None` if none was kept."""
    reports = []
    for path in folder.glob(f"{name}-*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        reports.append((report["date"], path.name, report))
    return max(reports, key=lambda one: one[:2])[2] if reports else None


def headlines(folder: Path = RESULTS) -> str:
    """Markdown: one table of what matters first."""
    reports = {name: newest(name, folder) for name in TITLES}
    rows, places = [], set()
    for name, figure, words in HEADLINES:
        report = reports[name]
        found = {one["name"]: one for one in report["figures"]} if report else {}
        if report and figure in found:
            rows.append(_row(found[figure], words))
            places.add("{processor}, {cores} cores".format(**report["environment"]))
    if not rows:
        return NOTHING + "\n"
    return "\n".join([*HEAD, *rows, "", f"On {' and '.join(sorted(places))}.", ""])


def tables(folder: Path = RESULTS) -> str:
    """Markdown: a section with the table of each benchmark that has a kept report."""
    reports = {name: newest(name, folder) for name in TITLES}
    made = [section(name, report) for name, report in reports.items() if report is not None]
    return "\n".join(made) or NOTHING + "\n"


def section(name: str, report: Mapping[str, Any]) -> str:
    """Markdown: one row for each figure that was measured, and where it was measured."""
    figures = {figure["name"]: figure for figure in report["figures"]}
    rows = [_row(figures[one], words) for one, words in MEANINGS[name].items() if one in figures]
    place = report["environment"]
    (path,) = (one.relative_to(ROOT) for one in (ROOT / "benchmarks").glob(f"*/{name}.py"))
    module = ".".join(path.with_suffix("").parts)  # it may have moved since
    command = re.sub(r"(?<=-m )\S+", module, report["command"])
    return "\n".join(
        [
            f"## {TITLES[name]}",
            "",
            f"{REMARKS[name]}.",
            "",
            *HEAD,
            *rows,
            "",
            f"{place['processor']}, {place['cores']} cores, torch {place['torch']}, Python "
            f"{place['python']}; {report['date']}, commit {place['commit']}. "
            f"`{command}` repeats it; the head of `{path}` says what is compared.",
            "",
        ]
    )


def _row(figure: Mapping[str, Any], words: str) -> str:
    show = _shown(figure["unit"])
    spread = f"{show(figure['low'])} to {show(figure['high'])}"
    goal = "" if figure["goal"] is None else show(figure["goal"])
    met = {None: "", True: "yes", False: "no"}[figure["met"]]
    return f"| {words} | **{show(figure['value'])}** ({spread}) | {goal} | {met} |"


def _shown(unit: str) -> Any:
    """How values of a unit are written."""
    return {
        "ratio": lambda value: f"{value:.2f}",
        "share": lambda value: f"{value:.1%}",
        "points": lambda value: f"{value:+.2f} points",
        "s": lambda value: f"{value:.0f} s" if value >= 10 else f"{value:.2g} s",
    }.get(unit, lambda value: f"{value:.4g} {unit}")


def filled(text: str, block: str) -> str:
    """A document's text with its block as it should be."""
    text, found = BLOCK.subn(lambda m: m[1] + block + m[3], text)
    if found != 1:
        raise SystemExit("a document does not hold exactly one block of figures")
    return text


def main() -> None:
    """Write the blocks, or with ``--check`` compare them."""
    for name, make in DOCUMENTS.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        after = filled(before, make())
        if after == before:
            continue
        if sys.argv[1:] == ["--check"]:
            raise SystemExit(f"{name} is out of step: run python -m benchmarks.harness.tables")
        path.write_text(after, encoding="utf-8")


DOCUMENTS: dict[str, Callable[[], str]] = {"README.md": headlines, "docs/measured.md": tables}

if __name__ == "__main__":
    main()
