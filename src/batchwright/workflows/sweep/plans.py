"""Makes the plans of a sweep's cells: without measuring if the batch is given, else from a probe.

A plan is made once for each setting and used for all its seeds. Errors are found before anything is
started, except those that need a probe's measurements.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchwright.errors import BatchwrightError, Interrupted, PlanError, one_line
from batchwright.planning.planner import make_plan, plan_without_profile
from batchwright.planning.validation import PLANNING_KEYS
from batchwright.records import DataFacts, Job, NetworkFacts, Plan, Profile, SweptKey
from batchwright.records.documents import read_record, write_record
from batchwright.records.text.formatting import setting_words
from batchwright.reporting.render.progress import steps
from batchwright.storage.files import make_folder
from batchwright.workflows.match_rounds import pair_measurer_for, pairs_of, settle
from batchwright.workflows.prepare_job import data_facts, ready_for, sides_of
from batchwright.workflows.prices import check_prices, job_here
from batchwright.workflows.sweep.grid import Cell

_MEASURED_KEYS = frozenset(Job.model_fields) - PLANNING_KEYS | {"launch", "workers"}
"""Job keys in which cells that share a probe agree; the probe measures all their resolutions."""
_FORMAT_KEYS = frozenset(("network", "network_args"))
"""Job keys in which cells with given batches agree that share a number format: with different ones
they could not be compared."""


def needs_probe(job: Job) -> bool:
    """Whether a plan needs measurements: no batch is given, or step times are needed and not given.

    A parameter server and simulated workers need step times.
    """
    times = (job.virtual.sample_seconds, job.virtual.step_seconds)
    stated = job.launcher.simulated and None not in times
    if (job.method_spec.served or job.launcher.simulated) and not stated:
        return True
    batches: list[object] = [job.global_batch]
    if job.method_spec.takes("cycle.batches"):
        batches.append(job.cycle.batches)
    if job.method_spec.served:
        batches.append(job.dual.large_batches)
    return all(isinstance(batch, str) for batch in batches)


class Planner:
    """Makes the plans of a sweep's cells, and caches the facts and profiles that it needs.

    ``keys`` are those that the sweep gives values.

    Attributes:
        plans: Plans by the cell's name; missing: not made yet.
        errors: Errors, in one line, of cells that cannot be planned, by name.
        facts: Facts of the data, once they were opened.
    """

    def __init__(self, keys: Sequence[SweptKey]) -> None:
        self._keys = [one.key for one in keys]
        self.plans: dict[str, Plan] = {}
        self.errors: dict[str, str] = {}
        self.facts: DataFacts | None = None
        self._ready: dict[str, Job] = {}
        self._data: dict[str, DataFacts] = {}
        self._networks: dict[str, NetworkFacts] = {}

    def prepare(self, cells: Iterable[Cell]) -> None:
        """Plan the cells that need no measurements, and refuse cells that cannot be run.

        Raises:
            BatchwrightError: A cell's job, prices, data, network or batch is wrong; the message
                names the cell.
        """
        from batchwright.workload.host import half_of, resolve_device

        for of_setting in _by_setting(cells):
            first = of_setting[0]
            with self._named(first):
                job = ready_for(check_prices(first.job), self._data_of(first.job))
                self._ready[first.name] = job
                if needs_probe(job):
                    continue
                if job.goal.prices is not None:
                    raise PlanError(
                        f"goal.prices={job.goal.prices} prices kinds of workers, which a probe "
                        "finds, and where the batch is given none is made: give goal.price, the "
                        "price of a worker for an hour"
                    )
                plan = plan_without_profile(job, self._data_of(job), self._network_of(job))
                # Otherwise `measure` has to choose the number format.
                if job.precision != "auto" or half_of(resolve_device(job.device)) is None:
                    self._take(of_setting, plan)

    def measure(self, cells: Iterable[Cell], folder: Path) -> None:
        """Probe for the cells that are not planned yet, and plan them.

        A cell that cannot be planned gets an entry in `errors`, and the others continue. The
        sweep's folder takes profiles and logs.

        Raises:
            BatchwrightError: The probe itself failed.
            Interrupted: A stop signal came.
        """
        waiting = [one for one in _by_setting(cells) if one[0].name not in self.plans]
        given = [one for one in waiting if not needs_probe(self._ready[one[0].name])]
        for key, group in self._alike(given, _FORMAT_KEYS).items():
            self._plan_given(key, group, folder)
        others = [one for one in waiting if one not in given]
        for key, group in self._alike(others, _MEASURED_KEYS).items():
            profile = self._probed(key, [self._ready[one[0].name] for one in group], folder)
            for of_setting in group:
                profile = self._planned(of_setting, profile, folder)

    # ----------------------------------------------------------------------------------- measuring

    def _alike(
        self, settings: Iterable[list[Cell]], keys: frozenset[str]
    ) -> dict[str, list[list[Cell]]]:
        """Settings grouped by the values of some job keys; a group's own key is their JSON."""
        groups: dict[str, list[list[Cell]]] = {}
        for of_setting in settings:
            key = _agreeing(self._ready[of_setting[0].name], keys)
            groups.setdefault(key, []).append(of_setting)
        return groups

    def _plan_given(self, key: str, group: Sequence[list[Cell]], folder: Path) -> None:
        """Plan settings with given batches, all in the format that is fastest at the largest batch.

        They get the same format, since they are to be compared, also if the sweep gets more values
        later. Its folder keeps it, and that of an earlier version's sweep at least in the plans.
        """
        from batchwright.probing.commands import Compared
        from batchwright.probing.probe import compare_formats

        jobs = [self._ready[cells[0].name] for cells in group]
        largest = max(jobs, key=lambda job: 0 if job.global_batch == "auto" else job.global_batch)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        kept = folder / "profiles" / f"format-{digest}.json"
        planned = [
            plan.precision
            for plan in self.plans.values()
            if _agreeing(plan.job, _FORMAT_KEYS) == key and not needs_probe(plan.job)
        ]
        if kept.exists():
            precision = read_record(kept, Compared).precision
        elif planned and "precision" not in self._keys:
            precision = planned[0]
        else:
            logs = folder / "logs" / f"format-{digest}"
            make_folder(logs)
            make_folder(kept.parent)
            workers = 1 if largest.workers == "auto" else largest.workers  # as planned below
            compared = compare_formats(largest.model_copy(update={"workers": workers}), logs)
            write_record(compared, kept)
            precision = compared.precision
        for cells, job in zip(group, jobs, strict=True):
            chosen = job.model_copy(update={"precision": precision})
            plan = plan_without_profile(chosen, self._data_of(job), self._network_of(job))
            self._take(cells, plan)

    def _probed(self, key: str, jobs: Sequence[Job], folder: Path) -> Profile:
        """The profile for these jobs: from the sweep's folder, or measured now."""
        from batchwright.probing.probe import probe

        sides = sorted({s for job in jobs if job.resolutions != "auto" for s in job.resolutions})
        digest = hashlib.sha256(f"{key}{sides}".encode()).hexdigest()[:12]
        kept = folder / "profiles" / f"{digest}.json"
        if kept.exists() and not (found := read_record(kept, Profile)).trials_open:
            return found
        logs = folder / "logs" / f"probe-{digest}"
        make_folder(logs)
        make_folder(kept.parent)
        job = jobs[0].model_copy(update={"resolutions": tuple(sides)} if sides else {})
        with steps() as show:
            return probe(job, logs, kept=kept, progress=show)

    def _planned(self, cells: Sequence[Cell], profile: Profile, folder: Path) -> Profile:
        """Plan a setting, as `run` does: two batch sizes are measured side by side.

        Returns:
            The profile, with the pairs that were measured.
        """
        try:
            job = job_here(self._ready[cells[0].name], profile)
            plan = make_plan(profile, job)
            if pairs_of(plan):
                logs = folder / "logs" / f"pairs-{cells[0].name}"
                with pair_measurer_for(plan, logs) as measure:
                    settled = settle(plan, profile, measure, lambda known: make_plan(known, job))
                plan, profile = settled.plan, settled.profile
            self._take(cells, plan)
        except Interrupted:
            raise
        except BatchwrightError as error:
            self.errors |= {cell.name: one_line(error) for cell in cells}
        return profile

    # -------------------------------------------------------------------------------------- opening

    def _take(self, cells: Sequence[Cell], plan: Plan) -> None:
        """Keep the plan for each seed's cell."""
        # A single worker without a server computes the same in the cell's own process.
        alone = plan.job.launcher.processes and plan.workers == 1 and plan.server is None
        start = {"launch": "in-process"} if alone else {}
        for cell in cells:
            job = plan.job.model_copy(update={"seed": cell.seed, **start})
            data = self._data_of(cell.job)
            self.plans[cell.name] = plan.model_copy(update={"job": job, "data": data})

    def _data_of(self, job: Job) -> DataFacts:
        key = json.dumps([job.data, job.data_args, job.val, job.unreadable, job.resolutions])
        if key not in self._data:
            self._data[key] = data_facts(job)
        self.facts = self.facts or self._data[key]
        return self._data[key]

    def _network_of(self, job: Job) -> NetworkFacts:
        from batchwright.workload.starting_weights import freeze
        from batchwright.workload.task import build_network, network_facts

        key = json.dumps([job.network, job.network_args, job.resolutions, job.frozen])
        if key not in self._networks:
            data = self._data_of(job)
            side = max(sides_of(job, data))
            classes = len(data.classes)
            network = build_network(
                job.network,
                classes=classes,
                side=side,
                dropout=job.dropout,
                arguments=job.network_args,
            )
            freeze(network, job.frozen)
            self._networks[key] = network_facts(job.network, network, side, data.channels)
        return self._networks[key]

    @contextmanager
    def _named(self, cell: Cell) -> Iterator[None]:
        """Inside, put the cell's values before an error's message."""
        try:
            yield
        except BatchwrightError as error:
            error.args = (f"setting {setting_words(self._keys, cell.values)}: {error}",)
            raise


def _by_setting(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells grouped by setting: those of a group differ in the seed alone."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(json.dumps(cell.values), []).append(cell)
    return list(found.values())


def _agreeing(job: Job, keys: frozenset[str]) -> str:
    """The values of some keys of a job, as JSON."""
    return json.dumps(job.model_dump(mode="json", include=set(keys)), sort_keys=True)
