"""The verb: a grid in, a folder of runs with its table, figures and page out.

    batchwright sweep data=digits epochs=5 global_batch=64 --grid learning_rate=0.05,0.1 --seeds 3

The way through the folder: `grid` reads what varies, `plans` decides each setting, `slots` says how
many run at once, `runner` runs them, `gathering` puts together what came of it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from batchwright.distributed.joining.environments import joined
from batchwright.distributed.supervisor import noting_signals
from batchwright.errors import Interrupted, JobError, LostWorkerError
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
from batchwright.records.job import other_keys_come
from batchwright.records.run_folder import (
    CHECKPOINTED,
    existing_run,
    new_folder,
    telling_how_to_resume,
)
from batchwright.records.text.formatting import counted
from batchwright.records.text.problems import printable
from batchwright.reporting.data.sweep_curves import sweep_csv
from batchwright.reporting.pages.page_sweep import sweep_page
from batchwright.reporting.render.figures import write_sweep_figures
from batchwright.reporting.render.sweep_progress import SweepProgress
from batchwright.storage.files import make_folder
from batchwright.workflows.engines import refuse_to_hand_over
from batchwright.workflows.prepare_job import TRAINING_KEYS, job_of, refuse_unconfirmed_code
from batchwright.workflows.prices import check_prices
from batchwright.workflows.sweep.gathering import Book
from batchwright.workflows.sweep.grid import (
    Cell,
    Grid,
    cells_of,
    read_grid,
    seeds_of,
    setting_words,
    widened,
)
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

    Each run is one of `train`, in a process of its own and a run folder under ``cells/``. Runs that
    fail do not stop the others; they are told in the record. Where the global batch is given
    nothing is probed, and a run has one worker unless the job says otherwise.

    Args:
        job: What all runs share: a job, the path of its YAML file, or ``None`` for the defaults.
        grid: By job key its values, such as ``{"warmup_epochs": [0, 5], "scaling": ["sqrt"]}``;
            with ``resume`` it may add values.
        seeds: How many, from the job's own on, or which; unset: three. With ``resume`` it may add
            some.
        out: Folder for everything, new or empty; unset: a new one under ``runs``.
        at_once: Most runs at the same time; ``auto``: as many as keep all cores, or GPUs, busy.
        resume: Go on with the sweep in ``out``: finished runs are kept, interrupted ones go on from
            their checkpoint, failed ones are tried again.
        overrides: ``key=value`` texts, as on the command line.
        keys: Job keys to change; with ``resume`` only `TRAINING_KEYS`, and names of code to import,
            which have to be repeated.

    Returns:
        What came of it, as in ``sweep.json``.

    Raises:
        BatchwrightError: What is wrong with grid, job, data or folder, before anything is started.
        Interrupted: A stop signal came; what there is can be resumed.
    """
    refuse_no_path(out, "out")
    overrides, most = texts_of(overrides), read_at_once(at_once)
    asked = ""
    with ExitStack() as held:
        with other_keys_come():  # those of the grid
            if not resume:
                job = check_prices(job_of(job, keys, overrides))
                swept = read_grid(job, grid or {})
                chosen = seeds_of(job, DEFAULT_SEEDS if seeds is None else seeds)
                asked = f"{job.model_dump_json()} {swept} {chosen}"
                if (again := begun_before(out, asked)) is not None:
                    keys, overrides = {key: getattr(job, key) for key in job.code_keys}, []
                    job, out, resume = None, again, True
            if resume:
                folder = held.enter_context(existing_run(out, "sweep.json"))
                job, swept, chosen = _widened(folder, job, grid, seeds, overrides, keys)
        assert isinstance(job, Job)  # noqa: S101 - made above
        if joined() is not None and job.launcher.joins:
            job = job.model_copy(update={"launch": "local"})  # each run by one of the processes
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
            kept = {name: read_record(at, Plan) for name, at in files.items() if at.exists()}
            planner.plans |= kept
        planner.prepare(cell for cell in cells if cell.name not in planner.plans)
        _slots(planner, most)  # refuses too many at once
        if not resume:
            folder = held.enter_context(new_folder(out, job, "sweep"))
            note_begun(folder, asked)
            held.enter_context(_resumable(folder, job, swept, cells))
        _say(f"{counted(len(cells), 'run')} of {job.network} on {job.data}, in {folder}")
        find_everywhere(folder)
        book = Book(folder, job, swept, chosen, cells)
        book.data = planner.facts
        _write(book)
        planner.measure((cell for cell in cells if cell.name not in planner.plans), folder)
        _take_plans(folder, book, cells, planner)
        _tell_doubts([one.key for one in swept], cells, planner.plans)
        _tell_optimizers([one.key for one in swept], planner.plans.values())
        _tell_crowding(planner.plans.values())
        stopped = _run(folder, book, cells, planner, most)
        found = book.sweep()
        if stopped:  # soon: figures would take as long again
            left = counted(len(cells) - len(found.done), "run")
            raise Interrupted(stopped, f"stopped by signal {stopped} with {left} to go")
        tell(found)
    return found


def tell(found: Sweep) -> None:
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
    """Job, keys and seeds of the sweep in a folder, with what is to join them."""
    if job is not None:
        raise JobError(f"resume takes the job from {folder}: leave it out")
    kept = read_record(folder / "sweep.json", Sweep)
    changed = change_job(kept.job, keys, overrides)
    for key in Job.model_fields:
        if getattr(changed, key) != getattr(kept.job, key) and key not in TRAINING_KEYS:
            raise JobError(
                f"{key}={getattr(changed, key)} differs from the sweep's "
                f"{getattr(kept.job, key)}: begin another one in another --out"
            )
    swept, chosen = kept.keys, kept.seeds
    if grid:
        swept = widened(swept, read_grid(changed, grid))
    if seeds is not None:
        chosen = tuple(dict.fromkeys((*chosen, *seeds_of(changed, seeds))))
    return changed, swept, chosen


def _take_plans(folder: Path, book: Book, cells: Iterable[Cell], planner: Planner) -> None:
    """Keep the plans, and note in the book what is known of the cells."""
    for cell in cells:
        plan = planner.plans.get(cell.name)
        if plan is None:
            book.ended(cell.name, "failed", planner.errors[cell.name])
            continue
        if not plan_file_of(folder, cell).exists():  # it goes on with it when it is resumed
            make_folder(folder / "plans")
            write_record(plan, plan_file_of(folder, cell))
        book.planned(cell.name, plan)


def _tell_doubts(keys: Sequence[str], cells: Sequence[Cell], plans: dict[str, Plan]) -> None:
    """Say once for each setting what of its rate may not be meant."""
    told: dict[str, None] = {}
    for cell in cells:
        plan = plans.get(cell.name)
        name = setting_words(keys, cell.values)
        for doubt in rate_schedule(plan).doubts if plan else ():
            said = doubt if doubt.startswith(f"{name} ") else f"{name}: {doubt}"
            told[f"warning: {printable(said)}"] = None
    for line in told:
        _say(line)


def _tell_optimizers(keys: Collection[str], plans: Collection[Plan]) -> None:
    """Say where settings differ in the optimizer, which the grid does not name."""
    taken = sorted({plan.update for plan in plans})
    if len(taken) > 1 and "optimizer" not in keys:
        _say(
            f"warning: optimizer=auto takes {' and '.join(taken)}, by setting, so these differ by "
            f"more than the grid says: give optimizer={taken[-1]} to compare the rest alone"
        )


def _tell_crowding(plans: Collection[Plan]) -> None:
    """Say where runs have more workers than a process that shares the sweep has cores for them."""
    started, cores = joined(), own_machine([]).cores  # too few GPUs are refused
    widest = max(map(width_of, plans), default=0)
    if started is not None and widest > cores and all(p.job.device == "cpu" for p in plans):
        _say(
            f"warning: workers={widest}: a run starts {widest} processes of its own, and each of "
            f"the {started.size} that {started.by} has started has {counted(cores, 'core')} for "
            "them, on which they take turns: start fewer, or give fewer workers"
        )


def _run(folder: Path, book: Book, cells: Sequence[Cell], planner: Planner, most: AtOnce) -> int:
    """Run what is left; returns the stop signal, or 0."""
    from batchwright.distributed.joining.gathering import stops_of_all

    plans, slots = planner.plans, _slots(planner, most)
    widths = [width_of(plan) for plan in plans.values()]
    todo = [(cell, plans[cell.name]) for cell in cells if book.state_of(cell.name) == "waiting"]
    _write(book)
    _tell_lost(folder, (cell for cell, _ in todo))
    progress = SweepProgress(total=len(cells), done=len(cells) - len(todo))
    with noting_signals() as noted, progress as shown:
        shown.expect({cell.name: plan.epochs for cell, plan in todo})

        def ended(name: str, state: State, error: str) -> None:
            book.ended(name, state, error)
            shown.ended(book.cell(name))
            _write(book)

        watcher = Watcher(began=shown.began, wrote=shown.wrote, ended=ended)
        stops = stops_of_all(noted)
        number, own = hand_out(folder, todo, widths, most)
        Runner(folder, slots, watcher).run(own, stops)
        mine = {cell.name for cell, _ in own}
        others = [cell for cell, _ in todo if cell.name not in mine]
        take_down(number, folder, others, watcher, stops)
        return next(iter(stops()), 0)


def _tell_lost(folder: Path, cells: Iterable[Cell]) -> None:
    """Say which runs begin again although they had come to a checkpoint: those are gone."""
    for cell in cells:
        run = run_folder_of(folder, cell)
        if (run / CHECKPOINTED).exists() and not has_checkpoint(folder, cell):
            _say(
                f"warning: {cell.name}: no checkpoint to go on from is left in {run}, so it is "
                "trained anew"
            )


def _slots(planner: Planner, most: AtOnce) -> Slots:
    """Room for the cells that are planned.

    Raises:
        JobError: There is none for so many at once.
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


def _write(book: Book) -> None:
    """The record as far as it goes, for whoever looks meanwhile."""
    found = book.sweep()
    write_record(found, Path(found.folder) / "sweep.json")


def _resumable(
    folder: Path, job: Job, swept: Sequence[SweptKey], cells: Iterable[Cell]
) -> AbstractContextManager[None]:
    """Inside, a stop, or a process that is lost, says what goes on with the sweep."""
    command = _resuming_command(folder, job, swept, cells)
    return telling_how_to_resume(command, LostWorkerError)


def _resuming_command(
    folder: Path, job: Job, swept: Sequence[SweptKey], cells: Iterable[Cell]
) -> str:
    """What goes on with the sweep: it names again the code that the job and the grid import."""
    values = {one.key: ",".join(map(str, one.values)) for one in swept}
    words = ["batchwright", "sweep", "--resume", "--out", str(folder)]
    for key in dict.fromkeys(key for cell in cells for key in cell.job.code_keys):
        if key in values:
            words += ["--grid", f"{key}={values[key]}"]
        else:
            words.append(f"{key}={getattr(job, key)}")
    return shlex.join(words)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - so that it can be found while it runs
