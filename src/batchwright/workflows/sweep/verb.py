"""The verb `sweep`: runs a grid of settings into a folder with a table, figures and a page.

    batchwright sweep data=digits epochs=5 global_batch=64 --grid learning_rate=0.05,0.1 --seeds 3

The other modules of this folder: `grid` reads keys and values, `plans` plans each setting, `slots`
assigns cores and GPUs, `runner` runs the cells, `gathering` collects the results, and `sharing`
divides a sweep among processes of another launcher.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from batchwright.distributed.joining.environments import joined
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import Interrupted, JobError, LostWorkerError, stopped_by
from batchwright.planning.schedule import rate_schedule
from batchwright.records import Job, Plan, Sweep, SweptKey
from batchwright.records.documents import (
    change_job,
    read_record,
    refuse_no_path,
    texts_of,
    write_record,
    write_text,
)
from batchwright.records.job import as_written, other_keys_come
from batchwright.records.run_folder import (
    CHECKPOINTED,
    existing_run,
    new_folder,
    telling_how_to_resume,
)
from batchwright.records.text.formatting import counted, setting_words
from batchwright.records.text.problems import to_stderr
from batchwright.reporting.data.sweep_curves import run_words, sweep_csv
from batchwright.reporting.pages.page_sweep import sweep_page
from batchwright.reporting.render.figures import write_sweep_figures
from batchwright.reporting.render.sweep_progress import SweepProgress
from batchwright.storage.files import make_folder
from batchwright.workflows.engines import refuse_to_hand_over
from batchwright.workflows.job_changes import (
    named_code,
    planned_differences,
    refuse_unconfirmed_code,
)
from batchwright.workflows.prepare_job import job_of
from batchwright.workflows.prices import check_prices
from batchwright.workflows.sweep.gathering import Results
from batchwright.workflows.sweep.grid import Cell, Grid, cells_of, read_grid, seeds_of, widened
from batchwright.workflows.sweep.plans import Planner
from batchwright.workflows.sweep.runner import (
    Runner,
    State,
    Watcher,
    has_checkpoint,
    plan_file_of,
    run_folder_of,
)
from batchwright.workflows.sweep.sharing import hand_out, own_machine, take_down
from batchwright.workflows.sweep.slots import AtOnce, Slots, read_at_once, width_of
from batchwright.workflows.together import begun_before, find_everywhere, note_begun, together

DEFAULT_SEEDS = 3
_OWN_COMMAND = re.compile(r"`batchwright run --resume [^`]*?( goal\.deadline=[^ `]+)?`$")
"""The end of a cell's error: the command that continues this cell alone."""
_NUMBER = re.compile(r"\d[\d.e+-]*")


@together(Sweep)
def sweep(
    job: Job | str | Path | None = None,
    grid: Grid | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    at_once: str | int = "auto",
    resume: bool = False,
    overrides: Iterable[str] = (),
    **keys: Any,
) -> Sweep:
    """Run a job with every combination of some keys' values, several seeds of each.

    Each run is a `train` in a process of its own, with a run folder under ``cells/``. Runs that
    fail do not stop the others; the record holds their errors. If the global batch is given, only
    the number format is probed, if it is open, and a run has one worker unless the job sets more.

    Args:
        job: The job that all runs share, the path of its YAML file, or ``None`` for the defaults.
        grid: Values by job key, such as ``{"warmup_epochs": [0, 5], "scaling": ["sqrt"]}``; with
            ``resume`` it may add values.
        seeds: Number of seeds, counted up from the job's own, or a list of seeds; unset: three.
            With ``resume`` it may add seeds.
        out: Folder of the sweep, new or empty; unset: a new one under ``runs``.
        at_once: Most runs at the same time; ``auto``: as many as keep all cores, or GPUs, busy.
        resume: Continue the sweep in ``out``: finished runs are kept, interrupted ones continue
            from their checkpoint, failed ones are tried again.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; with ``resume`` only `TRAINING_KEYS`, ``goal``'s deadline, and
            names of code to import, which have to be repeated.

    Returns:
        The record of the sweep, as in ``sweep.json``.

    Raises:
        BatchwrightError: Grid, job, data or folder is wrong; nothing was started.
        Interrupted: A stop signal came; the sweep can be resumed.
    """
    refuse_no_path(out, "out")
    overrides, most = texts_of(overrides), read_at_once(at_once)
    asked, again = "", None
    with ExitStack() as held:
        with other_keys_come():  # the grid's keys
            if not resume:
                job = check_prices(job_of(job, keys, overrides))
                swept = read_grid(job, grid or {})
                chosen = seeds_of(job, DEFAULT_SEEDS if seeds is None else seeds)
                asked = f"{job.model_dump_json()} {swept} {chosen}"
                if (again := begun_before(out, asked)) is not None:
                    keys, overrides = named_code(job), []
                    job, out, resume = None, again, True
            if resume:
                folder = held.enter_context(existing_run(out, "sweep.json", again=bool(again)))
                job, swept, chosen = _widened(folder, job, grid, seeds, overrides, keys)
        assert isinstance(job, Job)  # noqa: S101 - made above
        if joined() is not None and job.launcher.joins:
            job = job.model_copy(update={"launch": "local"})  # each process starts its own runs
        cells = cells_of(job, swept, chosen)
        for cell in cells:
            refuse_to_hand_over(cell.job, "sweep")
        planner = Planner(swept)
        if resume:
            held.enter_context(_resumable(folder, job, swept, cells))
            named = [*keys, *(grid or {})]
            for cell in cells:
                refuse_unconfirmed_code(cell.job, named, overrides)
            files = {cell.name: plan_file_of(folder, cell) for cell in cells}
            planner.plans |= {
                name: read_record(file, Plan) for name, file in files.items() if file.exists()
            }
        planner.prepare(cell for cell in cells if cell.name not in planner.plans)
        _slots(planner, most)  # refuses too many runs at once before anything is started
        if not resume:
            folder = held.enter_context(new_folder(out, job, "sweep"))
            note_begun(folder, asked)
            held.enter_context(_resumable(folder, job, swept, cells))
        to_stderr(f"{counted(len(cells), 'run')} of {job.network} on {job.data}, in {folder}")
        find_everywhere(folder)
        results = Results(folder, job, swept, chosen, cells)
        results.data = planner.facts
        _write(results)
        planner.measure((cell for cell in cells if cell.name not in planner.plans), folder)
        _take_plans(folder, results, cells, planner)
        names = [one.key for one in swept]
        _warn_of_settings(names, cells, planner.plans)
        _warn_of_crowding(planner.plans.values())
        command = _resuming_command(folder, job, swept, cells)
        stopped = _run(folder, results, cells, planner, most, command, names)
        found = results.sweep()
        if stopped:  # ends at once, without the figures
            left = counted(len(cells) - len(found.done), "run")
            raise Interrupted(stopped, f"{stopped_by(stopped)} with {left} to go")
        write_sweep_report(found)
    return found


def write_sweep_report(found: Sweep) -> None:
    """Write table, figures and page of a sweep into its folder.

    Raises:
        FileError: They cannot be written.
    """
    folder = Path(found.folder)
    write_text(sweep_csv(found), folder / "sweep.csv")
    write_sweep_figures(found, folder / "figures")
    write_text(sweep_page(found), folder / "sweep.html")


def _widened(
    folder: Path,
    job: Job | str | Path | None,
    grid: Grid | None,
    seeds: int | Sequence[int] | None,
    overrides: Sequence[str],
    keys: dict[str, Any],
) -> tuple[Job, tuple[SweptKey, ...], tuple[int, ...]]:
    """Job, keys and seeds of the sweep in a folder, with more values and seeds added."""
    if job is not None:
        raise JobError(f"resume takes the job from {folder}: leave it out")
    kept = read_record(folder / "sweep.json", Sweep)
    changed = change_job(kept.job, keys, overrides)
    for key, before, now in planned_differences(kept.job, changed):
        raise JobError(
            f"{key}={as_written(now)} differs from the sweep's {as_written(before)}: begin another "
            "one in another --out"
        )
    swept, chosen = kept.keys, kept.seeds
    if grid:
        swept = widened(swept, read_grid(changed, grid))
    if seeds is not None:
        chosen = tuple(dict.fromkeys((*chosen, *seeds_of(changed, seeds))))
    return changed, swept, chosen


def _take_plans(folder: Path, results: Results, cells: Iterable[Cell], planner: Planner) -> None:
    """Write the plans into the sweep's folder, and record them, or their errors."""
    for cell in cells:
        plan = planner.plans.get(cell.name)
        if plan is None:
            results.ended(cell.name, "failed", planner.errors[cell.name])
            continue
        if not plan_file_of(folder, cell).exists():  # a resumed sweep keeps its plans
            make_folder(folder / "plans")
            write_record(plan, plan_file_of(folder, cell))
        results.planned(cell.name, plan)


def _warn_of_settings(keys: Sequence[str], cells: Sequence[Cell], plans: dict[str, Plan]) -> None:
    """Warn of learning rates that may not be intended, and of settings that differ in optimizer or
    number format, which the grid does not name.

    Warnings that differ in their numbers alone are one: that of the first such setting.
    """
    warnings: dict[str, dict[str, str]] = {}  # by words without numbers, and by setting
    for cell in cells:
        plan = plans.get(cell.name)
        name = setting_words(keys, cell.values)
        for doubt in rate_schedule(plan).doubts if plan else ():
            whole = doubt if doubt.startswith(f"{name} ") else f"{name}: {doubt}"
            warnings.setdefault(_NUMBER.sub("", doubt), {})[name] = f"warning: {whole}"
    for first, *others in (list(alike.values()) for alike in warnings.values()):
        more = f"; the same in {counted(len(others), 'other setting')}" if others else ""
        to_stderr(f"{first}{more}")
    for key, field in (("optimizer", "update"), ("precision", "precision")):
        taken = sorted({getattr(plan, field) for plan in plans.values()})
        if len(taken) > 1 and key not in keys:
            to_stderr(
                f"warning: {key}=auto takes {' and '.join(taken)}, by setting, so these differ by "
                f"more than the grid says: give {key}={taken[-1]} to compare the rest alone"
            )


def _warn_of_crowding(plans: Collection[Plan]) -> None:
    """Warn if runs have more workers than a process that shares the sweep has cores for them.

    Too few GPUs are refused in `_slots`.
    """
    started, cores = joined(), own_machine([]).cores
    widest = max(map(width_of, plans), default=0)
    if started is not None and widest > cores and all(p.job.device == "cpu" for p in plans):
        to_stderr(
            f"warning: workers={widest}: a run starts {widest} processes of its own, and each of "
            f"the {started.size} that {started.by} has started has {counted(cores, 'core')} for "
            "them, on which they take turns: start fewer, or give fewer workers"
        )


def _run(
    folder: Path,
    results: Results,
    cells: Sequence[Cell],
    planner: Planner,
    most: AtOnce,
    command: str,
    keys: Sequence[str],
) -> int:
    """Run the cells that are not finished; returns the stop signal that came, or 0.

    ``command`` continues the sweep. In a cell's error it takes the place of the cell's own command,
    unless that sets a deadline which the grid sets for the cell.
    """
    from batchwright.distributed.joining.gathering import stops_of_all

    plans, slots = planner.plans, _slots(planner, most)
    widths = [width_of(plan) for plan in plans.values()]
    waiting = [cell for cell in cells if results.cell(cell.name).state == "waiting"]
    todo = [(cell, plans[cell.name]) for cell in waiting]
    _write(results)
    words = {cell.name: run_words(keys, cell.values, cell.seed) for cell in cells}
    for cell in waiting:
        run = run_folder_of(folder, cell)
        if (run / CHECKPOINTED).exists() and not has_checkpoint(folder, cell):
            to_stderr(
                f"warning: {words[cell.name]}: no checkpoint to go on from is left in {run}, so it "
                "is trained anew"
            )
    progress = SweepProgress(total=len(cells), done=len(cells) - len(todo), words=words)
    with noting_signals() as noted, progress as shown:
        shown.expect({cell.name: plan.epochs for cell, plan in todo})

        def ended(name: str, state: State, error: str) -> None:
            own = _OWN_COMMAND.search(error)
            if own and not (own[1] and "goal.deadline" in keys):
                error = f"{error[: own.start()]}`{command}{own[1] or ''}`"
            results.ended(name, state, error)
            shown.ended(results.cell(name))
            _write(results)

        watcher = Watcher(began=shown.began, wrote=shown.wrote, ended=ended)
        stops = stops_of_all(noted)
        number, own = hand_out(folder, todo, widths, most)
        Runner(folder, slots, watcher).run(own, stops)
        mine = {cell.name for cell, _ in own}
        others = [cell for cell, _ in todo if cell.name not in mine]
        take_down(number, folder, others, watcher, stops)
        return next(iter(stops()), 0)


def _slots(planner: Planner, most: AtOnce) -> Slots:
    """The resources for the planned cells.

    Raises:
        JobError: They are too few for that many cells at once.
    """
    planned = list(planner.plans.values())
    machine, widths = own_machine(planned), [width_of(plan) for plan in planned]
    if joined() is not None and machine.gpus and max(widths, default=0) > len(machine.gpus):
        own = counted(len(machine.gpus), "GPU")
        raise JobError(
            f"workers={max(widths)}: each process of this sweep has {own} for itself; "
            "start fewer processes, or give workers= and global_batch="
        )
    return Slots(machine, widths, most)


def _write(results: Results) -> None:
    """Write ``sweep.json`` with the results so far."""
    found = results.sweep()
    write_record(found, Path(found.folder) / "sweep.json")


def _resumable(
    folder: Path, job: Job, swept: Sequence[SweptKey], cells: Iterable[Cell]
) -> AbstractContextManager[None]:
    """Inside, the message of a stop, or of a lost process, names the command that continues."""
    command = _resuming_command(folder, job, swept, cells)
    return telling_how_to_resume(command, LostWorkerError)


def _resuming_command(
    folder: Path, job: Job, swept: Sequence[SweptKey], cells: Iterable[Cell]
) -> str:
    """The command that continues the sweep; it repeats import strings of the job and the grid."""
    values = {one.key: ",".join(map(str, one.values)) for one in swept}
    words = ["batchwright", "sweep", "--resume", "--out", str(folder)]
    for key in dict.fromkeys(key for cell in cells for key in cell.job.code_keys):
        if key in values:
            words += ["--grid", f"{key}={values[key]}"]
        else:
            words.append(f"{key}={getattr(job, key)}")
    return shlex.join(words)
