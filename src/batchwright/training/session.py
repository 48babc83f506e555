"""The public handle: a user's own training loop, run as a plan says, in a few changed lines.

    if __name__ == "__main__":  # loader processes import the script
        with bw.Session(model, optimizer, dataset, plan=plan, run_folder="runs/a") as session:
            for epoch in session.epochs():
                for images, labels in session.batches():
                    session.step(criterion(model(images), labels))
                session.evaluate(test_set, accuracy)

Start it with ``torchrun --nproc-per-node N script.py``, or as a plain script for one worker.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from batchwright.client.reporter_process import ReporterProcess, outcome_of
from batchwright.distributed.group import Group, failure_behind
from batchwright.distributed.joining.environments import adopt, found
from batchwright.distributed.processes import (
    die_with_agent,
    refuse_unguarded_script,
    started_by_hand,
)
from batchwright.distributed.server_child import SERVER
from batchwright.errors import (
    ArgumentError,
    FileError,
    Interrupted,
    NewPlan,
    PlanError,
    TrainingError,
)
from batchwright.records import Plan, Stage
from batchwright.records.documents import record_of, refuse_no_path, write_record
from batchwright.records.text.problems import printable, to_stderr
from batchwright.storage.locks import WAIT_SECONDS, Lock, take
from batchwright.training.all_reduce_run import AllReduceRun
from batchwright.training.batches.feeding import Batch, Feed, ImagePart, feed_of
from batchwright.training.batches.stage_settings import StageSettings
from batchwright.training.evaluate.evaluation import (
    Evaluation,
    Forward,
    Metric,
    evaluation_batch,
    outputs_and_labels,
)
from batchwright.training.parameter_server.server_run import ServerRun
from batchwright.training.running import Setup, average_of, compiled, replayed
from batchwright.training.session_checks import (
    as_weights,
    checked_norm,
    checked_number,
    checked_rates,
    checked_service,
    checked_weights,
    doubts,
    planned_loaders,
    refuse_default_device,
    refuse_other_things,
    refuse_several_devices,
    refuse_synchronized_on_cpu,
    refuse_unlike_workers,
    refuse_without_float64,
    scheduled_rate,
)
from batchwright.training.signals import StopRequest
from batchwright.training.step.stepper import Loss
from batchwright.workload.data.image_files import FilePipeline
from batchwright.workload.data.pipeline import ImagePipeline
from batchwright.workload.host import (
    enter,
    gpu_failure,
    is_out_of_memory,
    prepare_process,
    worker_threads,
)
from batchwright.workload.passes.recomputation import recompute

_NO_SCALED_STEP = "No inf checks were recorded"  # as GradScaler begins, without gradients

Images = Dataset[Any] | ImagePipeline | FilePipeline
"""A data set to train or evaluate on: a map-style one, or one of our pipelines."""


class Session:
    """Feeds batches, exchanges gradients, updates, evaluates, records and checkpoints.

    The model is used as it is, never wrapped. The plan's rate is a factor on each parameter group's
    own initial rate: build the optimizer with the rate that holds at the plan's base batch.

    Args:
        model: On its device already, where batches will arrive: with several GPUs on this worker's
            own, ``cuda:LOCAL_RANK``. Not in a wrapper such as `DistributedDataParallel`. All
            workers start from rank 0's weights.
        optimizer: Optimizer of the model's parameters, built once the model is on its device.
        dataset: Map-style data set, or an `ImagePipeline`.
        plan: The plan to follow, or the path of its file.
        run_folder: Folder for metrics, checkpoints and the summary; ``None`` keeps none.
        resume: Continue from ``run_folder``, all workers if one of them is told so; after a restart
            by torchrun this happens by itself.
        clip_norm: Largest global gradient norm, above 0; ``None``: as the plan's job says.
        learning_rate: ``"mine"`` leaves the optimizer's rates alone.
        images: Where the image is in a tuple or dict batch (index or key), for resizing.
        resize: Resizes a whole batch instead: f(batch, resolution in pixels) -> batch.
        collate: Makes a batch of items, as ``collate_fn`` of `torch.utils.data.DataLoader`; also
            for evaluations, so that mixup belongs into the loop.
        loaders: Loader processes for a map-style data set; ``None``: as the plan's job says, 2
            where it says nothing.
        sample_weights: How often each sample is drawn relative to the others, shape (samples,);
            drawn with replacement. ``None``: each exactly once per epoch.
        exit_on_stop: After a stop signal and its checkpoint, end the process with code 128 + the
            signal's number; ``False`` raises `Interrupted` instead, and so does a session outside
            the main thread, which only `stop` asks to.
        report_to: Address of a service that is told how the run goes, by a process beside worker
            0; needs a run folder. ``None``: none.
        follow_advice: Stop after an epoch with `errors.NewPlan` where a service's advice for the
            next is in the run folder, whose plan it has become; then resume with that plan.
        profile_memory: On the CPU, take one step of each row of the plan under PyTorch's profiler,
            so that the report tells the peak memory; not where the loop uses that profiler itself.
            On CUDA the allocator tells it anyway.

    Attributes:
        plan: The plan that is followed.
        device: The device on which batches arrive.
        rank: This worker, from 0.
        world_size: Number of workers.

    Raises:
        PlanError: The plan is for another number of workers (unless a run goes on), other data or
            several resolutions that nothing resizes; or the model is in a wrapper, or weights
            that it trains are on several devices.
        FileError: The run folder holds a run already, another process writes there, or it cannot be
            written; or the model's or the optimizer's state holds something that a checkpoint
            cannot give back.
        DataError: The data set can only be iterated.
        ArgumentError: An argument is something else than is said here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Images,
        *,
        plan: Plan | str | Path,
        run_folder: str | Path | None = None,
        resume: bool = False,
        clip_norm: float | None = None,
        learning_rate: Literal["plan", "mine"] = "plan",
        images: ImagePart | None = None,
        resize: Callable[[Batch, int], Batch] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int | None = None,
        sample_weights: Tensor | Sequence[float] | None = None,
        exit_on_stop: bool = True,
        report_to: str | None = None,
        follow_advice: bool = False,
        profile_memory: bool = False,
    ) -> None:
        refuse_unguarded_script()
        refuse_no_path(run_folder, "run_folder")
        refuse_other_things(model, optimizer, dataset)
        refuse_default_device()
        die_with_agent()
        self.plan = record_of(plan, Plan, "Session", "plan")
        self.model, self.optimizer = model, optimizer
        self.device = enter(next(model.parameters()).device)
        refuse_without_float64(self.device)
        refuse_several_devices(model, optimizer, alone=self.plan.workers == 1)
        self._clip_norm = checked_norm(clip_norm, self.plan)
        self._own_rates = checked_rates(learning_rate)
        in_main = threading.current_thread() is threading.main_thread()
        self._exit_on_stop = exit_on_stop and in_main  # else it would end that thread silently
        checked_number(loaders, "loaders", "Session", least=0)
        self._loaders = planned_loaders(self.plan) if loaders is None else loaders
        self._feed_of = partial(
            feed_of,
            device=self.device,
            seed=self.plan.job.seed,
            loaders=self._loaders,
            images=images,
            resize=resize,
            sides=[stage.resolution for stage in self.plan.stages],
            collate=collate,
        )
        self._held_out: tuple[Images, Feed] | None = None
        self._reporter: ReporterProcess | None = None
        self._lock: Lock | None = None
        self._entered = self._closed = self._keeps = False
        self._follow_advice, self._profile_memory = follow_advice, profile_memory
        if not run_folder and (resume or follow_advice):
            name = "resume" if resume else "follow_advice"
            raise ArgumentError(
                f"{name}=True of Session needs run_folder=: what it takes up stands there"
            )
        service = checked_service(report_to, run_folder)
        # A batch script may set WORLD_SIZE, and leave the rank to srun.
        if self.plan.workers > 1 and not os.environ.keys() >= {"RANK", "WORLD_SIZE"}:
            started = found()  # by srun or mpirun, which say it in other words
            if started is not None:
                adopt(started)
        prepare_process(worker_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        self._group = Group(self.device, self.plan.job.timeout)
        self._stop = StopRequest(twice=self._group.size == 1 and started_by_hand())
        try:
            folder = Path(run_folder) if run_folder else None
            self._open(dataset, folder, resume=resume, sample_weights=sample_weights)
            if service is not None and folder is not None and self.rank == 0:
                write_record(self.plan, folder / "plan.json")  # for the reporter
                self._reporter = ReporterProcess(folder, service, follow_advice=follow_advice)
                self._print_lines(self._reporter)
        except BaseException as error:
            self._close(error)
            raise

    def _open(
        self,
        dataset: Images,
        folder: Path | None,
        *,
        resume: bool,
        sample_weights: Any,
    ) -> None:
        sample_weights = as_weights(sample_weights)
        refuse_unlike_workers(
            self.plan,
            self._group,
            self.model,
            self.optimizer,
            run_folder="a folder" if folder is not None else "None",
            clip_norm=self._clip_norm,
            learning_rate="mine" if self._own_rates else "plan",
            sample_weights=sample_weights,
        )
        self._feed, self._folder = self._feed_of(dataset), folder
        again = False
        if folder is not None:
            again = self._group.started_again(folder)
            self._lock = self._locked(folder, again=again)
            self._group.note_start(folder, again=again)
            # Workers may differ in it: one joins later, or sees no folder of a run on its own disk.
            resume = any(self._group.gather(resume or again))
        planned, found = self.plan.data.train_samples, len(self._feed)
        if planned != found:
            raise PlanError(
                f"the plan is for {planned} training samples and the data set has {found}: "
                "probe and plan again for this data"
            )
        refuse_synchronized_on_cpu(self.model, self.device)
        if self.plan.job.activation_checkpointing == "on":
            recompute(self.model)
        self._setup = setup = Setup(
            plan=self.plan,
            model=self.model,
            optimizer=self.optimizer,
            feed=self._feed,
            settings=StageSettings(self.model, self._feed, self.plan),
            group=self._group,
            stop=self._stop,
            folder=folder,
            resume=resume,
            again=again,
            clip_norm=self._clip_norm,
            own_rates=self._own_rates,
            sample_weights=checked_weights(sample_weights, len(self._feed)),
            follow_advice=self._follow_advice,
            lock=self._lock,
            profile_memory=self._profile_memory,
            compilation=compiled(self.model, self.plan),
            graphs=replayed(self.model, self.plan),
            average=average_of(self.model, self.plan),
        )
        if setup.synchronized:
            self._group.watch()
        if self._follow_advice and self.plan.server is not None:
            raise PlanError("follow_advice=True with a parameter server: rounds keep their batches")
        if self._follow_advice and self.plan.growth:
            raise PlanError("follow_advice=True with batch_growth=noise: both change the batch")
        scheduled = scheduled_rate(self.optimizer)
        self._run = AllReduceRun(setup) if self.plan.server is None else ServerRun(setup)
        for doubt in doubts(
            self.plan,
            self.model,
            self.optimizer,
            self.device,
            first=self.rank == 0,
            own_rates=self._own_rates,
            scheduled=scheduled,
            loaders=self._loaders,
            stage=lambda: self.stage,
        ):
            warnings.warn(doubt, stacklevel=3)

    # -------------------------------------------------------------------------- for the user's loop

    @property
    def rank(self) -> int:
        """This worker, from 0."""
        return self._run.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._run.world_size

    @property
    def stage(self) -> Stage:
        """The plan's row that the current epoch, or round, belongs to."""
        return self._run.stage

    @property
    def local_batch_sizes(self) -> tuple[int, ...]:
        """Samples per step of each worker, in rank order, as they are now."""
        return self._run.local_batch_sizes

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale so far, in samples; ``None`` if it does not stand out yet.

        It takes two parts of a step at least: workers, or micro-batches of one (a plan made with
        ``micro_batch=`` of half the batch). With a parameter server it is that of this worker's
        micro-batches, since the workers' gradients never come together. With one part it stays
        ``None``, which a warning says.
        """
        scale, alone = self._run.noise_scale, self.world_size == 1 or self.plan.server is not None
        if scale is None and alone and all(one.accumulation_steps == 1 for one in self.plan.stages):
            warnings.warn(
                "session.noise_scale takes two parts of a step, and here a step is one: plan with "
                "micro_batch= of half the batch, or with more workers that exchange gradients",
                stacklevel=2,
            )
        return scale

    @property
    def evaluation_due(self) -> bool:
        """Whether the job wants the model evaluated now, after the batches of the epoch.

        That is after every `evaluate_epochs`-th epoch and the last. With a parameter server one
        worker evaluates, the one whose round has completed such an epoch.
        """
        return self._run.evaluation_due

    def keep(self, name: str, thing: Any) -> None:
        """Put anything with a ``state_dict`` (an average of weights, a counter) into checkpoints.

        On a resumed run its state is loaded at once, as it was. It may hold tensors, numbers, text,
        NumPy arrays, paths, and plain lists, tuples, sets and dicts of them; NumPy's numbers come
        back as Python's. With a scheduler of PyTorch the optimizer gets its rates back, too.

        Raises:
            ArgumentError: ``thing`` has no ``state_dict`` or ``load_state_dict``.
            FileError: Its state holds something else. If it only does so later, the next checkpoint
                is refused, and the one before stays.
            PlanError: The plan has a parameter server: each worker's things are its own there.
        """
        self._run.keep(name, thing)
        self._keeps = True

    def stop(self) -> None:
        """Ask for a checkpoint and an orderly end, as SIGTERM does; any thread may.

        All workers stop after the same step, where one of them is asked. Outside the main thread
        no signal is heard, and this is the only way, such as before a machine is taken away.
        """
        self._stop.ask()

    def epochs(self) -> Iterator[int]:
        """The zero-based epochs that are left to train.

        None are left once an evaluation has reached the accuracy that the plan's goal aims for, as
        its ``top1``. With a parameter server each turn is a round of this worker, and yields the
        epoch that most of its samples are of. A run that goes on after a stop in an evaluation
        begins with that epoch, which has no batches left.

        Raises:
            RuntimeError: The context was left; or was not entered, with a run folder or several
                workers.
        """
        self._refuse_closed("epochs")
        if not self._entered and (self._folder is not None or self.world_size > 1):
            raise RuntimeError(
                "session.epochs() before its `with` block, whose end writes the summary and leaves "
                "the other workers: write `with bw.Session(...) as session:`"
            )
        scheduled = self._own_rates and scheduled_rate(self.optimizer) is not None
        folder = self._folder is not None and self.plan.server is None and self.rank == 0
        if scheduled and folder and not self._keeps:
            warnings.warn(
                "checkpoints do not hold the scheduler of the optimizer's rate, and a resumed run "
                "would begin it anew: session.keep('scheduler', scheduler) before session.epochs()",
                stacklevel=2,
            )
        yield from self._run.epochs()

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the current epoch, on the device, at the stage's resolution.

        Each comes once: where a loop over them was left before its end, the next one in the same
        epoch goes on behind the last `step`.

        Between a batch and its `step`, autocast is on if the plan computes in 16 bits. With a
        parameter server the batches are those of a round, and after the last one the model is
        exchanged.

        Raises:
            Interrupted: A stop signal came, or the time was up; a checkpoint was written.
            RuntimeError: A batch was taken without a `step` for the one before, or after one that
                ended with an error; or another loop over the batches of the epoch is still open.
            LostWorkerError: The parameter server is gone.
        """
        yield from self._run.batches()

    def step(self, loss: Loss | None = None, *, weight: float | None = None) -> bool:
        """Backward pass; after the step's last micro-batch also exchange, check, clip and update.

        Where memory runs out, all workers get the samples of this step once more, this one in
        smaller micro-batches: simply go on with the loop. Out of the backward pass that works for
        any loss, out of the forward pass for a function.

        Args:
            loss: Mean loss of the micro-batch's samples, a scalar, or a function without arguments
                that computes it; ``None`` if `backward` was called for all its parts.
            weight: What the loss is the mean over, if not the samples of the micro-batch (for
                example labelled pixels); with 0 the loss is not looked at.

        Returns:
            Whether the weights were updated: not before the last micro-batch of a step, and not
            where a gradient was infinite or not a number, memory ran out or compiling failed.

        Raises:
            RuntimeError: No batch is open, no parameter got a gradient, or an error of a step
                before was caught, which may have left it half done.
            ValueError: The loss is no scalar tensor; or the weight is negative, infinite or not a
                number.
            LostWorkerError: Another worker is gone.
            TrainingError: Gradients were not finite for many steps in a row, or not even the
                smallest micro-batch fits into memory.
        """
        return self._run.stepper.step(loss, weight)

    def backward(self, loss: Loss, *, weight: float | None = None) -> None:
        """One of several backward passes for the same micro-batch; then call `step` without loss.

        Args:
            loss: As for `step`; the parts' losses add up.
            weight: As for `step`, and the same for all parts.

        Raises:
            RuntimeError: No batch is open, or as for `step`.
            ValueError: As for `step`, or a part before had another weight.
        """
        self._run.stepper.backward(loss, weight)

    def evaluate(
        self,
        dataset: Images,
        metric: Metric,
        *,
        forward: Forward = outputs_and_labels,
        batch_size: int | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """Mean of a metric over a held-out set, each sample counted once over all workers.

        Stands outside the training clock. Batch normalization uses all workers' statistics. With a
        parameter server only the worker for which `evaluation_due` holds evaluates; the others get
        the last known means at once, none before the first.

        Args:
            dataset: Map-style, or an `ImagePipeline`.
            metric: f(outputs, labels) -> a value for each sample, shape (n,), or a dict of such;
                a bool tensor is taken as top-1 accuracy. The first that is not called ``loss``
                decides which checkpoint is ``best`` (more is better); of ``loss`` alone the lowest.
            forward: f(model, batch) -> (outputs, labels), for batches other than such pairs.
            batch_size: Samples in one forward pass; unset: the plan's micro-batch at its highest
                resolution, at least as many as have the pixels of 64 images of 32 px. Where
                memory runs out this worker goes on with half as many, in later evaluations too,
                and warns.
            model: Another than the session's, such as an average of its weights.

        Returns:
            The mean of each value, over all samples; the same on all workers.

        Raises:
            ArgumentError: ``batch_size`` is no whole number from 1 on.
            DataError: The data set is empty, can only be iterated, or is not that of all workers.
            ValueError: The metric gave something else than one value for each sample.
            RuntimeError: The context was left, or an error of a step before, or with several
                workers of an evaluation before, was caught.
            TrainingError: Not even one sample fits into memory.
            Interrupted: A stop signal came; a checkpoint was written.
        """
        self._refuse_closed("evaluate")
        checked_number(batch_size, "batch_size", "session.evaluate()", least=1)
        # The feed of the last evaluated set is kept: its loader processes take time to start.
        if self._held_out is None or self._held_out[0] is not dataset:
            if self._held_out is not None:
                self._held_out[1].close()
                self._held_out = None  # where the other one is refused, it must not be used again
            self._held_out = dataset, self._feed_of(dataset)
        feed, size = self._held_out[1], batch_size or evaluation_batch(self.plan)
        model = self.model if model is None else model  # a compiled one has no truth
        return self._run.evaluate(Evaluation(model, feed, metric, forward, size))

    def __repr__(self) -> str:
        if not hasattr(self, "_run"):
            return "<Session: not open>"
        plan, folder = self.plan, "none" if self._folder is None else self._folder
        return printable(
            f"<Session: worker {self.rank} of {self.world_size}, device {self.device}, network "
            f"{plan.network.name}, data {plan.data.name}, method {plan.method}, epochs "
            f"{plan.epochs}, folder {folder}>"
        )

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        ended = error
        try:
            if error is not None:  # first: a layer may have gone on with what is no number
                self._group.refuse_given_up(error)
            if error is None:
                self._run.finish()
            elif failure := gpu_failure(error):
                raise TrainingError(self._of_gpu(failure)) from error
            elif (behind := failure_behind(error)) is not None:
                raise behind from error
            elif isinstance(error, AssertionError) and str(error).startswith(_NO_SCALED_STEP):
                raise ArgumentError(
                    "the loop calls a torch.amp.GradScaler, which finds no gradients, as "
                    "session.step() has used them: leave the scaler out and give session.step() "
                    "the loss itself, which precision=float16 scales by the same rules"
                ) from error
            elif is_out_of_memory(error):
                error.add_note(
                    "batchwright repeats such a step in smaller micro-batches if session.step() "
                    "gets a function that computes the loss: "
                    "session.step(lambda: criterion(model(images), labels))"
                )
        except BaseException as failure:
            ended = failure
            if not (isinstance(failure, Interrupted) and self._exit_on_stop):
                raise
            error = failure  # a stop that came with the last step
        finally:
            if self._reporter is not None:
                self._reporter.end(*outcome_of(ended))
                self._print_lines(self._reporter)
                self._reporter = None
            self._close(None if isinstance(ended, Interrupted | NewPlan) else ended)
        if isinstance(error, Interrupted) and self._exit_on_stop:
            if self.rank == 0:
                kept = f"; continue with resume=True in {self._folder}" if self._folder else ""
                _say(f"{error}{kept}")
            raise SystemExit(error.exit_code) from None

    # -------------------------------------------------------------------------------------- set-up

    def _locked(self, folder: Path, *, again: bool) -> Lock | None:
        """Make worker 0 the folder's only writer; all workers learn whether it could.

        Where the command has started a parameter server, the server is the writer.
        """
        lock, problem = None, ""
        if self._group.rank == 0 and SERVER not in os.environ:
            # The others wait in an exchange. After a restart the lock may be that of a host that
            # went down, of which a shared disk learns late.
            most = 0.75 * self.plan.job.timeout
            try:
                lock = take(
                    folder,
                    "another run_folder",
                    seconds=most if again else min(WAIT_SECONDS, most),
                    unless=lambda: self._stop.number > 0,
                    tell=_say,
                )
            except FileError as error:
                problem = str(error)
        problem = self._group.gather(problem)[0]
        if problem:
            raise FileError(problem)
        return lock

    def _refuse_closed(self, name: str) -> None:
        if self._closed:
            raise RuntimeError(
                f"session.{name}() behind its `with` block: the session has let go of its data and "
                "of the other workers; call it inside, or make another session"
            )

    @staticmethod
    def _print_lines(reporter: ReporterProcess) -> None:
        for line in reporter.lines():
            _say(line)

    def _of_gpu(self, failure: str) -> str:
        """Message of a GPU that has failed, with what often is the cause, and how to go on."""
        of_index = re.search("assert|illegal memory access", failure)
        often = "often a label is no class, or an index is out of range: " if of_index else ""
        then = "; then resume from the last checkpoint" if self._folder is not None else ""
        return (
            f"the GPU of {self._group.places[self.rank]} has failed: {failure}; {often}"
            f"CUDA_LAUNCH_BLOCKING=1 shows the line{then}"
        )

    def _close(self, error: BaseException | None) -> None:
        self._closed = True
        # First, or whatever waits for the device may wait for a worker that is gone.
        if error is not None:
            self._group.give_up(error)
        if self._reporter is not None:  # the session could not even begin
            self._reporter.end("failed", None)
        if hasattr(self, "_run"):
            self._run.close()
        if hasattr(self, "_setup"):
            self._setup.end_replay()
        if hasattr(self, "_feed"):
            self._feed.close()
        if self._held_out is not None:
            self._held_out[1].close()
        self._stop.close()
        self._group.close(error)
        if self._lock is not None:
            self._lock.close()


def _say(line: str) -> None:
    to_stderr(f"batchwright: {line}")
