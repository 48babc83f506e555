"""The page's facts: the job, the data, the network and the machine."""

from __future__ import annotations

from html import escape
from pathlib import Path

from batchwright.records import Profile, RunSummary
from batchwright.records.text.formatting import counted, duration, number, size
from batchwright.records.text.load_text import load_words
from batchwright.reporting.pages import markup


def job_part(summary: RunSummary) -> str:
    """The job, as YAML that reads back."""
    import yaml

    text = yaml.safe_dump(summary.plan.job.model_dump(mode="json"), sort_keys=False)
    return f"<pre>{escape(text)}</pre>"


def environment_part(summary: RunSummary) -> str:
    """Data and network, and what was measured on."""
    data, network = summary.plan.data, summary.plan.network
    facts = [
        ("data", f"{data.name}, {data.side} px"),
        ("images", f"{data.train_samples:,} training, {data.val_samples:,} held out"),
        ("held out", data.split),
        ("unreadable images left out", f"{data.skipped:,}"),
        ("data SHA-256", data.digest),
        ("network", f"{network.name}, {network.parameters:,} weights"),
        ("exchanged gradient", size(network.trained_bytes)),
        ("run folder", Path(summary.run_folder).name),
    ]
    classes = ", ".join(markup.safe(name) for name in data.classes)
    names = f"<summary>Names of the classes ({len(data.classes):,})</summary><p>{classes}</p>"
    return markup.pair(
        f"<div>{markup.table('Data and network', None, facts)}<details>{names}</details></div>",
        f"<div>{markup.table('Environment', None, _cluster(summary))}</div>",
    )


def profile_facts(profile: Profile) -> str:
    """What a profile was measured on, as a table."""
    steps = [
        ("network and data", f"{profile.network.name} on {profile.data.name}"),
        ("step times", f"{len(profile.steps):,} measured"),
    ]
    return markup.table("What was measured", None, [*steps, *_measured(profile)])


def _cluster(summary: RunSummary) -> list[tuple[str, str]]:
    if summary.profile is None:
        return [("hardware", "not measured: the run had no profile")]
    return _measured(summary.profile)


def _measured(profile: Profile) -> list[tuple[str, str]]:
    cluster, noise = profile.cluster, profile.noise
    scale = noise.noise_scale if noise else None
    return [
        ("device", f"{cluster.device_name} ({cluster.device})"),
        ("cores", str(cluster.cores)),
        ("workers that measured", f"{cluster.workers}, {counted(cluster.threads, 'thread')} each"),
        ("memory per worker", size(cluster.memory_bytes)),
        ("Python", cluster.python),
        ("PyTorch", cluster.torch),
        ("allocator", cluster.allocator),
        ("gradient noise scale", f"{number(scale)} samples" if scale else "below measurement"),
        ("measured in", duration(profile.probe_seconds)),
        *([("busy meanwhile", told)] if (told := load_words(profile.load)) else []),
    ]
