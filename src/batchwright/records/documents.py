"""Reading and writing files: a job as YAML with ``key=value`` overrides, other records as JSON.

Each error is one line that names the file, the key, the value and what to try. Writing is atomic:
the old file stays until the new one is whole. Values of job keys are parsed by `text.job_values`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml
from pydantic import ValidationError

from batchwright.errors import ArgumentError, FileError, JobError
from batchwright.records import Job, Record
from batchwright.records.base import record_text
from batchwright.records.text.job_keys import job_keys, value_problem
from batchwright.records.text.job_values import (
    ARGUMENTS,
    TABLES,
    flattened,
    parsed_argument,
    section_of,
    set_key,
)
from batchwright.records.text.problems import described, first_problem, key_of, shorten
from batchwright.records.text.yaml_text import parse_yaml, yaml_of, yaml_problem
from batchwright.storage.files import is_file, is_there, write_whole
from batchwright.storage.locks import LOCK_FILE

AnyRecord = TypeVar("AnyRecord", bound=Record)

_KINDS = {
    "Profile": "profile",
    "Plan": "plan",
    "RunSummary": "summary",
    "Sweep": "sweep",
    "Check": "check",
    "RateSchedule": "schedule",
    "Simulation": "simulation",
    "Job": "job",
    "KeptAdvice": "advice",
}
_WRITTEN_BY = {  # the verb that writes a kind of record
    "profile": "probe",
    "plan": "plan",
    "summary": "train",
    "sweep": "sweep",
    "simulation": "simulate",
}
_TAKEN_BY = {"profile": "plan", "plan": "train", "summary": "report"}  # the verb that reads it
_IN_A_RUN = ("job.yaml", "profile.json", "plan.json", "summary.json", "sweep.json")
TRAINED = ("summary.json", "metrics.jsonl", "checkpoints")
"""Files of a run folder that training alone leaves there."""
_MOST_READ = 2**28
"""Most characters that are read: an endless file such as /dev/zero would take all memory."""
_PIECE = 2**20
"""Characters that are read at a time: to read so many, Python first takes as many bytes."""


def record_of(
    given: AnyRecord | str | Path, model: type[AnyRecord], function: str, what: str = ""
) -> AnyRecord:
    """The record that a function such as ``train`` was given, itself or as the path of its file.

    Args:
        given: The function's argument.
        model: The kind of record.
        function: The function's name, for messages.
        what: The argument's name, where it is not the kind of record.

    Raises:
        ArgumentError: ``given`` is neither such a record nor a path.
        FileError: There is no such file, or it holds something else.
    """
    if isinstance(given, model):
        return given
    if isinstance(given, str | Path):
        return read_record(given, model)
    kind = _kind(model)
    called = f"{what}= of {function}" if what else function
    verb = _WRITTEN_BY.get(kind, "")
    hint = f": bw.{verb}(...) returns a {kind}" if verb else ""
    raise ArgumentError(
        f"{called} takes a {kind} or the path of its file, not {described(given)}{hint}"
    )


def texts_of(overrides: Iterable[str]) -> list[str]:
    """The ``key=value`` texts that a function was given, as a list.

    Raises:
        ArgumentError: ``overrides`` is no list of texts.
    """
    if isinstance(overrides, Iterable) and not isinstance(overrides, str | Mapping):
        texts = list(overrides)
        if all(isinstance(text, str) for text in texts):
            return texts
    shown = overrides if isinstance(overrides, str) and "=" in overrides else "epochs=3"
    raise ArgumentError(
        f"overrides= takes a list of key=value texts, not {described(overrides)}: write "
        f"overrides=[{shown!r}], or the keys by name, such as {shown}"
    )


def pairs_of(
    texts: Iterable[str],
    malformed: Callable[[str], Exception],
    *,
    option: str = "",
    twice: str = "leave one of the two out",
) -> dict[str, str]:
    """``key=value`` texts as a dictionary; a key with two different values is refused.

    Args:
        texts: Words of the command line, or overrides of a function.
        malformed: Makes the error for a text that is not ``key=value``.
        option: The option before each text, such as ``--set``, for messages.
        twice: What to do about a key with two values, for the message.

    Raises:
        Exception: Of the type that ``malformed`` makes: a text is malformed, or a key has two
            values.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals):
            raise malformed(text)
        if found.get(key, value) != value:
            before = f"{option} {key}".lstrip()
            raise type(malformed(text))(
                f"{before}={value}: {key}={found[key]} is given as well; {twice}"
            )
        found[key] = value
    return found


def refuse_no_path(given: object, name: str) -> None:
    """Refuse an argument that is neither a path nor `None`.

    Raises:
        ArgumentError: It is something else; the message says ``name``, the argument's name.
    """
    if given is not None and not isinstance(given, str | Path):
        raise ArgumentError(f"{name}= takes the path of a folder, not {described(given)}")


def load_job(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Job:
    """The job of a YAML file (or the defaults), changed by ``key=value`` texts.

    Args:
        path: YAML file with job keys; ``None`` starts from the defaults; ``-`` reads stdin.
        overrides: texts such as ``epochs=3`` or ``probe.budget=10``; ``resolutions=24,32`` is
            a list, ``goal.memory=null`` unsets, ``goal.kinds='[{kind: t4, count: 4}]'`` is a table.

    Raises:
        FileError: the file cannot be read or is not YAML with keys.
        JobError: an unknown key (the nearest is suggested), a wrong type or a wrong value.
    """
    if path is not None and str(path) != "-" and not is_there(path):
        raise FileError(
            f"there is no file {path}: give a job's YAML file, or keys by name, such as epochs=3"
        )
    values = _read_yaml(path) if path is not None else {}
    return change_job(Job(), values, overrides, place=f" in {_name_of(path)}" if path else "")


def change_job(
    job: Job,
    values: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    place: str = "",
) -> Job:
    """The job with other values for some keys.

    Args:
        job: The job to change.
        values: Values by key, nested or with dots.
        overrides: ``key=value`` texts, which win over ``values``.
        place: Where ``values`` come from, such as `` in job.yaml``, for messages.

    Raises:
        JobError: A key is unknown, or a value is wrong.
    """
    merged = job.model_dump(mode="json")
    from_file = flattened(values or {})
    sections = {key.partition(".")[0] for key in job_keys(Job) if "." in key}
    known: set[str] = set()
    for key, value in from_file:
        if value is None and key in sections:
            continue  # a heading in a file, with no key below it that is not a comment
        if key in known:
            raise JobError(f"job key {key} is given twice{place}, nested and with a dot: keep one")
        known.add(key)
        set_key(merged, key, value, place)
    given = pairs_of(
        texts_of(overrides),
        lambda text: JobError(f"{text!r} is no job key: write key=value, such as epochs=3"),
    )
    for key, raw in given.items():
        text = parsed_argument(key, raw) if section_of(key)[0] else raw
        set_key(merged, key, None if raw in ("null", "~") else text, "")
    try:
        return Job.model_validate(merged)
    except ValidationError as error:
        wrong = key_of(error.errors()[0])
        wrong = next((table for table in TABLES if wrong.startswith(table)), wrong)
        in_file = wrong in {k for k, _ in from_file} - given.keys()
        raise JobError(value_problem(error, place if in_file else "")) from None


def read_record(path: str | Path, model: type[AnyRecord]) -> AnyRecord:
    """The record in a JSON file, or in the file of that kind in a run folder; ``-`` reads stdin.

    Raises:
        FileError: The file is missing, unreadable, not JSON, or another kind of record.
    """
    kind = _kind(model)
    if str(path) != "-" and is_file(inside := Path(path, f"{kind}.json")):
        path = inside
    return parse_record(_read_text(path, _written_by(kind)), _name_of(path), model)


def read_one_of(path: str | Path, models: Sequence[type[Record]]) -> Record:
    """The record in a JSON file, of one of several kinds; the file's ``format`` says which.

    Raises:
        FileError: The file is missing, unreadable, not JSON, or none of these kinds.
    """
    text, where = _read_text(path), _name_of(path)
    kinds = [_kind(model) for model in models]
    listed = ", ".join(f"a {kind}" for kind in kinds[:-1])
    if not text.strip():
        raise FileError(f"{where} is empty, where {listed} or a {kinds[-1]} was expected")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise FileError(
            f"{where} is not JSON, as records are; a job's file ends in .yaml"
        ) from None
    for kind, model in zip(kinds, models, strict=True):
        if _kind_of(values) == kind:
            return parse_record(text, where, model)
    found = values.get("format") if isinstance(values, dict) else None
    what = f"its format is {shorten(found)}" if found is not None else "it has no format"
    raise FileError(f"{where} is neither {listed} nor a {kinds[-1]}: {what}")


def parse_record(text: str, where: str, model: type[AnyRecord]) -> AnyRecord:
    """The record in a JSON text; ``where`` names the text's origin in messages.

    Raises:
        FileError: The text is not JSON, or not this kind of record.
    """
    kind = _kind(model)
    hint = _written_by(kind)
    if not text.strip():
        raise FileError(f"{where} is empty, where a {kind} was expected{hint}")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        other = _kind_of(values)
        if other and other != kind:
            if (other, kind) == ("plan", "profile"):  # for example `plan plan.json --explain`
                hint += ", and `batchwright explain` shows why a plan is as it is"
            raise FileError(f"{where} is a {other}, not a {kind}{hint}") from None
        if other and values["format"] != (here := model.model_fields["format"].default):
            raise FileError(
                f"{where} is a {kind} as another version has it (its format = "
                f"{shorten(values['format'])}, and here it is {here!r}): make it anew{hint}"
            ) from None
        raise FileError(
            f"{where} is not a valid {kind}: {first_problem(error, 'its key ')}{hint}"
        ) from None


def _kind(model: type[Record]) -> str:
    return _KINDS.get(model.__name__, model.__name__)


def _written_by(kind: str) -> str:
    verb = _WRITTEN_BY.get(kind)
    return f"; `batchwright {verb}` writes a {kind}" if verb else ""


def _kind_of(values: Any) -> str:
    """The kind of record by the ``format`` of parsed JSON; empty if it is no record of ours."""
    said = values.get("format") if isinstance(values, dict) else None
    found = re.fullmatch(r"batchwright-([a-z]+)/\d+", said) if isinstance(said, str) else None
    return found[1] if found else ""


def kind_in(path: Path) -> str:
    """The kind of record that a file holds; empty if it is unreadable or no record of ours."""
    try:
        return _kind_of(json.loads(path.read_bytes()))
    except (ValueError, RecursionError, OSError):
        return ""


def refuse_other(path: Path, model: type[Record]) -> None:
    """Refuse to write a record over a file that must stay.

    Raises:
        FileError: The file holds anything but an earlier record of the same kind, such as a profile
            where a plan is to be written; or it belongs to a run that has trained.
    """
    kind, run = _kind(model), path.parent
    is_run = all(is_there(run / name) for name in ("job.yaml", LOCK_FILE))
    if path.name in _IN_A_RUN and is_run and any(is_there(run / name) for name in TRAINED):
        raise FileError(
            f"{path} is a record of the run in {run}, which has trained, and stays as it is: name "
            f"another file for the {kind}"
        )
    if not is_file(path) or not path.stat().st_size:
        return
    if (found := kind_in(path)) != kind:
        what = f"a {found}" if found else f"something else than a {kind}"
        raise FileError(f"{path} holds {what} and stays as it is: name another file for the {kind}")


def write_record(record: Record, path: str | Path) -> None:
    """Write a record as JSON; ``-`` writes to stdout."""
    write_text(record_text(record), path)


def write_text(text: str, path: str | Path) -> None:
    """Write a text file whole or not at all; ``-`` writes to stdout.

    Raises:
        FileError: the folder is missing or not writable, or the disk is full.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_whole(Path(path), text.encode())


def job_yaml(job: Job) -> str:
    """All keys of the job with their resolved values as YAML, in the documentation's order."""
    return yaml_of(job.model_dump(mode="json"))


def asked_yaml(job: Job) -> str:
    """The keys of a job that are not at their defaults, as YAML; empty if there are none."""
    asked = _changed(job.model_dump(mode="json"), Job().model_dump(mode="json"))
    return yaml_of(asked) if asked else ""


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if (
            isinstance(value, Mapping)
            and isinstance(defaults[key], Mapping)
            and key not in ARGUMENTS
        ):
            value = _changed(value, defaults[key]) or defaults[key]
        if value != defaults[key]:
            found[key] = value
    return found


def _name_of(path: str | Path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def _read_text(path: str | Path, hint: str = "") -> str:
    try:
        if str(path) == "-":
            text = _text_in(sys.stdin)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = _text_in(file)
    except FileNotFoundError:
        raise FileError(f"there is no file {path}{hint}") from None
    except UnicodeDecodeError:
        raise FileError(f"cannot read {_name_of(path)}: it is not text in UTF-8{hint}") from None
    except IsADirectoryError as error:
        inside = [name for name in _IN_A_RUN if is_there(Path(path, name))]
        there = f"; there is {' and '.join(inside)} in it" if inside else hint or "; name a file"
        raise FileError(f"cannot read {path}: {error.strerror}{there}") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > _MOST_READ:
        raise FileError(
            f"{_name_of(path)} does not end within {_MOST_READ:,} characters, as our files do{hint}"
        )
    return text.removeprefix("\ufeff")


def _text_in(file: TextIO) -> str:
    """The text of a file; of one with more than `_MOST_READ` characters more than so many."""
    pieces: list[str] = []
    for _ in range(0, _MOST_READ + 1, _PIECE):
        pieces.append(file.read(_PIECE))
        if len(pieces[-1]) < _PIECE:  # the end; at a terminal another read would ask for more
            break
    return "".join(pieces)


def _read_yaml(path: str | Path) -> Mapping[str, Any]:
    text = _read_text(path)
    if str(path) == "-" and not text.strip():  # the command before the pipe has failed
        raise FileError(
            "standard input is empty, where a job was expected: write lines as epochs: 3"
        )
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise FileError(f"{_name_of(path)}{line} is not YAML: {yaml_problem(error)}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise FileError(f"{_name_of(path)} holds no job keys: write lines such as `epochs: 3`")
    kind = _kind_of(values)
    if kind:  # JSON is YAML, too
        verb = _TAKEN_BY.get(kind, "")
        hint = f": `batchwright {verb}` takes one" if verb else ""
        raise FileError(f"{_name_of(path)} is a {kind}, not a job{hint}")
    return values
