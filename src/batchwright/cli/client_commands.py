"""Commands that speak to a service: `submit`, `fetch`, `send`, `agent`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from batchwright.cli.options import FollowAdvice, JobWords, JsonFlag
from batchwright.cli.output import amount, job_and_file
from batchwright.errors import ArgumentError, BatchwrightError, Interrupted

TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File that holds the token; else BATCHWRIGHT_TOKEN, or this machine's own token.",
    ),
]
Server = Annotated[str, typer.Option(metavar="URL", help="The service.")]
LOCAL_SERVICE = "http://127.0.0.1:8400"
"""The address that `serve` listens on by default."""
_MOST = 1_000_000  # GPUs or workers: a larger number is a typing error
_MAX_NAME = 120  # characters of a job's name


def submit(
    server: Server = LOCAL_SERVICE,
    words: JobWords = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The job's name; else that of its file, or network and data."
        ),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Train without waiting for the plan to be approved.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Print each change of its state until it has ended.")
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Only agents with this label; may be repeated."),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=_MOST, help="Only agents with at least N GPUs."),
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="Only agents with at least this memory, also as 8GB; of each GPU with --gpus.",
        ),
    ] = None,
    keep_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="How long the job waits for its agent to come back before another takes it over; "
            "also as 1h.",
        ),
    ] = None,
    token_file: TokenFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Queue a job at a service; one of its agents carries it out."""
    from batchwright.client.http import Service
    from batchwright.client.submitting import follow, needed, state_words
    from batchwright.client.submitting import submit as hand_in
    from batchwright.records.text.problems import printable

    gib = amount("--memory", memory, "GiB", least=0) or 0.0
    kept = amount("--keep-seconds", keep_seconds, "seconds", least=0)
    job, path = job_and_file(words)
    needs = needed(label or (), gpus, gib)
    usual_name = Path(path).stem if path and path != "-" else f"{job.network} on {job.data}"
    name = name or printable(usual_name)[:_MAX_NAME]
    url, token = _url_and_token(server, token_file)
    with Service(url, token) as service:
        info = hand_in(service, job, name=name, auto=auto, needs=needs, keep_seconds=kept)
        _tell(f"submitted as {info.id}")
        _tell(f"page: {url}/jobs/{info.id}")
        if wait:
            try:
                info = follow(service, info, _tell)
            except KeyboardInterrupt:
                _tell(f"the job goes on without being watched: {url}/jobs/{info.id}")
                raise
        else:
            _tell(state_words(info, url))
    if as_json:
        print(info.model_dump_json(indent=2))


def fetch(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's identifier, from `submit`.")],
    server: Server = LOCAL_SERVICE,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Files to fetch; logs are printed. Without names, all are listed."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the fetched files, except logs.")
    ] = Path(),
    token_file: TokenFile = None,
    as_json: JsonFlag = False,
) -> None:
    """List the files that a service keeps of a job, print its logs, fetch the others."""
    from pydantic import TypeAdapter, ValidationError

    from batchwright.client.artifacts import JobFiles
    from batchwright.client.http import Service
    from batchwright.records.service import Identifier
    from batchwright.records.text.formatting import size

    try:
        TypeAdapter(Identifier).validate_python(job)
    except ValidationError:
        raise ArgumentError(
            f"{job[:60]!r} is no identifier of a job: `batchwright submit` printed it, and the "
            "address of the job's page ends with it"
        ) from None
    if as_json and names:
        raise ArgumentError("--json lists the files: name none beside it")
    url, token = _url_and_token(server, token_file)
    with Service(url, token) as service:
        files = JobFiles(service, job)
        listed = files.listed()
        if as_json:
            print(listed.model_dump_json(indent=2))
            return
        found = {str(one.name): one for one in listed.artifacts}
        unknown = [name for name in names or () if name not in found]
        if unknown:
            there = f"there is {', '.join(found)}" if found else "there is nothing"
            raise BatchwrightError(f"{url} keeps no {unknown[0]} of this job: {there}")
        for name in names or ():
            if name.endswith(".log"):
                files.print_log(found[name], sys.stdout)
            else:
                files.save(found[name], out / name)
                _tell(f"{out / name}: {size(found[name].size)}")
        for one in found.values() if not names else ():
            print(f"{one.name}\t{size(one.size)}")
        if not found:
            _tell(f"{url} keeps nothing of this job: {url}/jobs/{job} shows how far it is")


def send(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The service. Without it, the one that the run reported to before; with "
            "--tracker, none.",
        ),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:PLACE]", help="A tracker, as for `run`; may be repeated."),
    ] = None,
    token_file: TokenFile = None,
) -> None:
    """Send to a service, or to trackers, the lines of a run that they do not have yet."""
    from batchwright.client.http import Service, checked_url
    from batchwright.client.outbox import seal_of
    from batchwright.client.sending import report_to_send
    from batchwright.client.sending import send as send_run

    if tracker:
        from batchwright.client.trackers.following import send_to_trackers

        outcome = "finished" if (run / "summary.json").exists() else ""
        for word, lines in send_to_trackers(run, tracker, outcome).items():
            _tell(f"{lines} lines of {run} are in {word}")
        if server is None:
            return
    report = report_to_send(run, None if server is None else checked_url(server))
    url, token = _url_and_token(report.url, token_file)
    if server is None and token_file is None and report.seal != seal_of(url, token):
        raise BatchwrightError(
            f"{run} reported to {url} with another token than yours: say "
            f"--server {shlex.quote(url)} if yours is meant for it"
        )
    report = report.to(seal=seal_of(url, token))
    with Service(url, token) as service:
        done = send_run(run, report, service, _tell)
    _tell(f"{done.next} lines of {run} are at {url}/runs/{done.run}")


def agent(
    folder: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder for the jobs' folders; only one agent may use it at a time."
        ),
    ],
    server: Server = LOCAL_SERVICE,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The agent's name, unique at the service; else made of machine and folder.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=PATTERN",
            help="Values that jobs may have for data, network, loss or weights; may be repeated.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Word that jobs may ask for; may be repeated."),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=_MOST, help="Refuse jobs with more workers."),
    ] = None,
    max_hours: Annotated[
        str | None,
        typer.Option(
            metavar="HOURS", help="Stop jobs that take longer, also as 90min, and give them back."
        ),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="GIB",
            help="Stop jobs whose folder is larger, also as 500GB, and give them back.",
        ),
    ] = None,
    retention_days: Annotated[
        str | None,
        typer.Option(
            metavar="DAYS",
            help="Days without work on a job after which its folder is removed; else never.",
        ),
    ] = None,
    follow_advice: FollowAdvice = False,
    token_file: TokenFile = None,
) -> None:
    """Carry out the jobs of a service on this machine, until stopped."""
    from pydantic import ValidationError

    from batchwright.client.agent import Agent, allowed, usual_name
    from batchwright.client.http import Service
    from batchwright.client.offering import Limits, offer
    from batchwright.records.service import AgentIntroduction
    from batchwright.records.text.problems import shorten

    hours, disk = amount("--max-hours", max_hours, "hours"), amount("--max-disk", max_disk, "GiB")
    limits = Limits(max_workers, hours, disk)
    retention = amount("--retention-days", retention_days, "days")
    rules = allowed(allow or ())
    try:
        introduction = AgentIntroduction(
            name=usual_name(folder) if name is None else name,
            chosen=name is not None,
            allow=rules,
            offer=offer(label or (), limits),
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        option, problem = wrong["loc"][0], wrong["msg"]
        if option == "name":
            problem = "give 1 to 120 characters on one line, no slash, not dots alone"
        raise BatchwrightError(f"--{option} {shorten(wrong['input'])}: {problem}") from None
    url, token = _url_and_token(server, token_file)
    with Service(url, token, answer_seconds=10.0) as service:
        try:
            Agent(
                service,
                token,
                folder,
                introduction,
                limits=limits,
                follow_advice=follow_advice,
                retention_days=retention,
                tell=_tell,
            ).work()
        except Interrupted as stop:  # no error: so every agent ends
            _tell(str(stop))
            raise typer.Exit(stop.exit_code) from None


def _url_and_token(server: str, token_file: Path | None) -> tuple[str, str]:
    """The checked address of the service, and the token for it.

    Raises:
        BatchwrightError: The address is not that of a service, or there is no token.
    """
    from batchwright.client.http import checked_url, find_token

    url = checked_url(server)
    token = find_token(url, token_file)
    if token is None:
        raise BatchwrightError(
            f"there is no token for {url}: set BATCHWRIGHT_TOKEN, or give --token-file; "
            "`batchwright token create NAME --scopes ...` makes one there"
        )
    return url, token


def _tell(line: str) -> None:
    """Print a line on standard error, if that can be written; see `to_stderr`."""
    from batchwright.records.text.problems import to_stderr

    to_stderr(line)
