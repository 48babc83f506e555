"""An example of each message, for the OpenAPI description: small, and accepted by the service."""

from __future__ import annotations

import json
from typing import Any

from batchwright.planning.planner import make_plan
from batchwright.records import (
    Cluster,
    CollectiveTime,
    DataFacts,
    EpochRecord,
    GradientNoise,
    Job,
    MemoryPoint,
    NetworkFacts,
    Plan,
    Profile,
    RunSummary,
    StepTime,
    WorkerTime,
)
from batchwright.records.base import Record

RUN = "5f0c2d1e-8a44-4a0b-9d0e-2f6f7c1f0a11"
JOB = "b7f7a1de-0c55-4a52-8d2e-6f6d1b1c9a22"
PROFILE = "0d9b1c7a-5e7f-4b59-a7b2-1f0e3c5d7b33"
KEY = "c1a5e0f2-3b4d-4c6e-8f90-a1b2c3d4e544"
THEN = 1790000000.0  # Unix time in seconds

_BATCHES = (16, 32, 64)


def profile() -> Profile:
    """Digits on one worker, as if measured."""
    job = Job(
        augment="crop",
        learning_rate=0.1,
        warmup_epochs=0,
        precision="float32",
        device="cpu",
        workers=1,
        resolutions=(32,),
        epochs=4,
    )
    return Profile(
        job=job,
        data=DataFacts(
            name="digits",
            digest="5e" * 32,
            train_samples=1437,
            val_samples=360,
            split="every fifth image of each class, seed 0",
            classes=tuple("0123456789"),
            side=32,
        ),
        network=NetworkFacts(
            name="resnet8", parameters=75_290, trained_bytes=301_160, batch_norm=True, least_side=8
        ),
        cluster=Cluster(
            device="cpu",
            device_name="some processor",
            workers=1,
            cores=2,
            threads=2,
            memory_bytes=3 * 2**30,
            python="3.11.2",
            torch="2.13.0",
            allocator="glibc",
        ),
        steps=tuple(_step(batch) for batch in _BATCHES),
        memory=tuple(
            MemoryPoint(
                resolution=32, local_batch_size=batch, peak_bytes=1_250_000 + 668_000 * batch
            )
            for batch in _BATCHES
        ),
        collectives=tuple(
            CollectiveTime(
                bytes=size, workers=2, seconds=0.002, low=0.0019, high=0.0022, repeats=20
            )
            for size in (1024, 301_160)
        ),
        noise=GradientNoise(
            noise_scale=120.0, trace=12.0, sqr_norm=0.1, relative_error=0.2, parts=4, repeats=20
        ),
        evaluation_seconds_per_image=0.0003,
        probe_seconds=12.0,
    )


def _step(batch: int) -> StepTime:
    seconds = 0.004 + 0.0006 * batch
    return StepTime(
        resolution=32,
        local_batch_size=batch,
        workers=1,
        compute_seconds=seconds,
        sync_seconds=0.0,
        step_seconds=seconds,
        step_low=0.97 * seconds,
        step_high=1.05 * seconds,
        repeats=30,
    )


def plan() -> Plan:
    """Made from `profile`, without what else there was."""
    made = make_plan(profile())
    return made.model_copy(
        update={"considered": (), "knees": (), "held_out": (), "reasons": made.reasons[:1]}
    )


def summary(followed: Plan) -> RunSummary:
    """A run of one epoch."""
    stage = followed.stages[0]
    worker = WorkerTime(
        place="node1/cpu",
        local_batch_size=stage.local_batch_sizes[0],
        samples=1437,
        input_seconds=0.1,
        compute_seconds=0.9,
        communication_seconds=0.0,
    )
    done = EpochRecord(
        epoch=0,
        resolution=stage.resolution,
        global_batch_size=stage.global_batch_size,
        steps=-(-1437 // stage.global_batch_size),
        skipped_steps=0,
        samples=1437,
        learning_rate=stage.learning_rate,
        train_loss=1.4,
        val_loss=0.9,
        val_correct=290,
        val_count=360,
        training_seconds=1.0,
        evaluation_seconds=0.1,
        checkpoint_seconds=0.02,
        workers=(worker,),
    )
    return RunSummary(
        run_folder="runs/a", plan=followed, epochs=(done,), setup_seconds=2.0, wall_seconds=4.0
    )


def _step_line() -> dict[str, Any]:
    return {
        "kind": "step",
        "epoch": 0,
        "step": 12,
        "steps": 45,
        "time/train_s": 0.51,
        "train/loss": 1.91,
        "throughput/samples_per_sec": 760.5,
        "lr": 0.1,
        "batch/global": 32,
        "batch/local/0": 32,
        "time/rank0/compute_s": 0.042,
        "time/rank0/wait_s": 0.0,
    }


def examples() -> dict[str, Any]:
    """JSON values by the name of their record."""
    followed = plan()
    measured = _json(profile())
    planned = _json(followed)
    ended = _json(summary(followed))
    job = {
        "id": JOB,
        "name": "digits overnight",
        "state": "planned",
        "auto": False,
        "approved": False,
        "created": THEN,
        "changed": THEN + 60,
        "job": _json(followed.job),
        "run": None,
        "agent": "gpu-box",
        "attempts": 1,
        "cancelling": False,
        "error": None,
        "has_profile": True,
        "has_plan": True,
        "waiting": None,
    }
    advice = {
        "number": 1,
        "epoch": 2,
        "reason": "epochs take 1.4 s, not the predicted 1.0 s; a global batch of 64 would take 1.1",
        "plan": planned,
        "taken": None,
    }
    return {
        "Health": {"status": "ok"},
        "Problem": {"detail": f"there is no run {RUN}"},
        "Plan": planned,
        "Profile": measured,
        "RunSummary": ended,
        "RunIntroduction": {
            "name": "digits, first try",
            "plan": planned,
            "profile": measured,
            "follows_advice": False,
            "job": None,
        },
        "RunInfo": {
            "id": RUN,
            "name": "digits, first try",
            "state": "running",
            "created": THEN,
            "changed": THEN + 5,
            "records": 40,
            "epochs": followed.epochs,
            "epochs_done": 1,
            "top1": 0.91,
            "method": followed.method,
            "workers": followed.workers,
            "global_batch_size": followed.stages[0].global_batch_size,
            "network": followed.network.name,
            "data": followed.data.name,
            "follows_advice": False,
            "demo": False,
            "job": None,
            "error": None,
        },
        "RunEnd": {"outcome": "finished", "summary": ended, "error": None},
        "RecordBatch": {"first": 0, "records": [_step_line()]},
        "RecordsTaken": {"next": 1, "advice": 0},
        "RecordPage": {
            "kind": "step",
            "total": 1,
            "stride": 1,
            "sequences": [0],
            "records": [_step_line()],
        },
        "Advice": advice,
        "AdviceTaken": {"epoch": 2},
        "PlanRequest": {
            "profiles": [measured],
            "runs": [],
            "keys": {"goal.objective": "knee", "epochs": 4},
        },
        "NewProfile": {"name": "gpu-box, digits", "profile": measured},
        "StoredProfile": {"id": PROFILE, "name": "gpu-box, digits", "created": THEN},
        "JobSubmission": {
            "name": "digits overnight",
            "job": {"data": "digits", "network": "resnet8", "epochs": 4},
            "auto": False,
        },
        "JobInfo": job,
        "AgentIntroduction": {"name": "gpu-box", "allow": ["data=digits"]},
        "AgentInfo": {"name": "gpu-box", "allow": ["data=digits"], "seen": THEN, "job": JOB},
        "Lease": {
            "key": KEY,
            "seconds": 30.0,
            "job": job | {"state": "probing", "has_profile": False, "has_plan": False},
            "profile": None,
            "plan": None,
        },
        "JobProgress": {"key": KEY, "state": "planned", "profile": measured, "plan": planned},
        "JobOrders": {"state": "planned", "stop": False},
    }


def _json(record: Record) -> Any:
    return json.loads(record.model_dump_json())
