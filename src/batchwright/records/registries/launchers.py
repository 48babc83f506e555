"""Launchers: job key ``launch``, which says how and where the workers' processes are started."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.records.registries.registry import Registry

STARTED_BY = "BATCHWRIGHT_ENGINE"
"""Environment variable with the launcher's name, set in processes that an engine has started."""


@dataclass(frozen=True)
class Launcher:
    """A way to start workers.

    Attributes:
        name: Name, as in a job.
        words: Description for the job key.
        train: Import string of a function that trains the plan of a run folder; its argument is a
            `workflows.run_training.Begun`. An example is `launch_workers` there.
        submit: Import string of a function that has an engine run the whole command on its
            machines, such as `workflows.engines.slurm:submit`; empty: the command trains itself.
        check: Import string of a function that refuses a job, its argument, for which this machine
            lacks the engine; it is called before a run folder is made.
        asks_gpus: Job key and value that ask the engine for GPUs.
        takes_nodes: Whether the engine is asked for the job's ``nodes``.
        one_worker: Whether there is only one worker, in the calling process.
        simulated: Whether one process computes all workers' gradients, in simulated time.
        joins: Whether processes that another launcher has started become the workers.
        resizes: Whether a run goes on with more or fewer workers than planned; the rest of the run
            is then planned again.
    """

    name: str
    words: str
    train: str
    submit: str = ""
    check: str = ""
    asks_gpus: str = ""
    takes_nodes: bool = False
    one_worker: bool = False
    simulated: bool = False
    joins: bool = False
    resizes: bool = False

    @property
    def processes(self) -> bool:
        """Whether each worker is a process of its own."""
        return not (self.one_worker or self.simulated)


_RUN = "batchwright.workflows.run_training"

LAUNCHERS = Registry(
    "launch",
    Launcher("local", "a process for each worker", f"{_RUN}:launch_workers"),
    Launcher("in-process", "one worker, here", f"{_RUN}:train_here", one_worker=True),
    Launcher(
        "virtual",
        "all workers' gradients in one process, in simulated time",
        f"{_RUN}:train_simulated",
        simulated=True,
    ),
    Launcher(
        "slurm",
        "a Slurm job is submitted and followed, which trains on its machines",
        f"{_RUN}:train_where_started",
        submit="batchwright.workflows.engines.slurm:submit",
        check="batchwright.workflows.engines.slurm:check",
        asks_gpus="slurm.gpus_per_node=1",
        takes_nodes=True,
        joins=True,
    ),
    Launcher(
        "ray",
        "Ray Train starts the workers, on the machines of a Ray cluster",
        f"{_RUN}:train_where_started",
        submit="batchwright.workflows.engines.ray_train:submit",
        check="batchwright.workflows.engines.ray_train:check",
        asks_gpus="ray.gpus_per_worker=1",
        joins=True,
        resizes=True,
    ),
    group="batchwright.launchers",
    auto=Launcher(
        "auto",
        "the processes that torchrun, srun or mpirun has started, where one has; else `local`",
        f"{_RUN}:train_where_started",
        joins=True,
    ),
)
