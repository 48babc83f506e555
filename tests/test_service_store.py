"""What the service keeps beside records: lists of runs, silence, retention, profiles, the audit
log; and the schema's way from nothing to now."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from artifacts import leased
from batchwright.errors import BatchwrightError
from batchwright.records import Job
from batchwright.records.service import AgentIntroduction, RunEnd, RunIntroduction
from batchwright.service.database.engine import Database, open_engine, shown
from batchwright.service.database.migrate import HEAD, migrate, revision
from batchwright.service.database.tables import metadata
from batchwright.service.problems import Conflict, NoRoom, NotFound, TooMany
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store import jobs as jobs_module
from batchwright.service.store import profiles as profiles_module
from batchwright.service.store import runs as runs_module
from samples import make_plan, make_profile
from services import HandClock, Service, step

# ---------------------------------------------------------------------------------- lists of runs


def test_runs_are_listed_newest_first_page_by_page(service):
    runs = []
    for number in range(7):
        service.clock.go(number % 3)  # some at the same time
        runs.append(service.a_run(name=f"run {number}"))
    found, before = [], None
    while page := service.store.runs.list(3, before):
        found += [run.id for run in page]
        before = found[-1]
    assert sorted(found) == sorted(runs)
    created = [service.store.runs.get(run).created for run in found]
    assert created == sorted(created, reverse=True)
    with pytest.raises(NotFound):
        service.store.runs.list(3, "no such run")


def test_the_page_after_a_run_stays_when_the_run_is_deleted(service):
    runs = []
    for _ in range(3):
        service.clock.go(1)
        runs.append(service.a_run())
    service.store.runs.delete(runs[1])
    assert [run.id for run in service.store.runs.list(before=runs[1])] == [runs[0]]


def test_a_run_is_silent_when_nothing_was_heard_of_it_for_a_while(service):
    run = service.a_run()
    assert service.store.runs.get(run).state == "running"
    service.clock.go(service.settings.silent_seconds + 1)
    assert service.store.runs.get(run).state == "silent"
    service.store.runs.alive(run)
    assert service.store.runs.get(run).state == "running"
    service.clock.go(service.settings.silent_seconds + 1)
    service.report(run, step(0))
    assert service.store.runs.get(run).state == "running"
    service.clock.go(service.settings.silent_seconds + 1)
    assert service.store.runs.get(run).state == "silent"
    assert [one.id for one in service.store.runs.list(state="silent")] == [run]
    service.store.runs.alive(run)
    assert [one.id for one in service.store.runs.list(state="running")] == [run]
    service.store.runs.end(run, RunEnd(outcome="finished"))
    service.clock.go(1e6)
    assert service.store.runs.get(run).state == "finished"


def test_no_run_is_silent_for_a_while_after_a_start_of_the_service(service):
    gone = service.a_run()
    service.clock.go(600)  # the service is away
    store = Store(service.store.database.engine, service.settings, service.clock)
    service.clock.go(service.settings.silent_seconds)
    assert store.runs.get(gone).state == "running"
    service.clock.go(1)
    assert store.runs.get(gone).state == "silent"


def test_a_list_of_silent_runs_shows_each_as_silent(service, monkeypatch):
    """Though a break is seen while it is made."""
    service.a_run()
    service.clock.go(service.settings.silent_seconds + 1)
    heard = iter((1000.0, 0.0))
    monkeypatch.setattr(service.store.listening, "seconds", lambda: next(heard))
    assert [one.state for one in service.store.runs.list(state="silent")] == ["silent"]


@pytest.mark.parametrize("jump", [600.0, -600.0])
def test_no_run_is_silent_for_a_while_after_the_clock_was_set(service, jump):
    steady, wall = HandClock(0.0), service.clock
    store = Store(service.store.database.engine, service.settings, wall, steady)
    goes_on, gone = service.a_run(), service.a_run()

    def go(seconds):
        for clock in (steady, wall):
            clock.go(seconds)

    def silent():
        found = [one.id for one in store.runs.list(state="silent")]
        assert [store.runs.get(run).state for run in (goes_on, gone)] == [
            "silent" if run in found else "running" for run in (goes_on, gone)
        ]
        assert len(store.runs.list(state="running")) == 2 - len(found)
        return found

    go(1)
    assert silent() == []
    wall.go(jump)
    assert silent() == []
    go(service.settings.silent_seconds)
    assert silent() == []
    store.runs.alive(goes_on)
    go(1)
    assert silent() == [gone]


def test_runs_are_filtered_by_state_and_by_what_they_are(service):
    silent = service.a_run(name="Silent one")
    service.clock.go(service.settings.silent_seconds + 1)
    running = service.a_run(name="running")
    failed = service.a_run(name="failed")
    service.store.runs.end(failed, RunEnd(outcome="failed", error="no memory"))
    for state, run in (("silent", silent), ("running", running), ("failed", failed)):
        assert [one.id for one in service.store.runs.list(state=state)] == [run]
    assert [one.id for one in service.store.runs.list(query="SILENT")] == [silent]
    assert len(service.store.runs.list(query="resnet8")) == 3
    assert service.store.runs.list(query="vgg") == []
    named = service.a_run(name="ÄPFEL von Zoë")
    for words in ("äpfel VON", "Äpfel", "ZOË"):
        assert [one.id for one in service.store.runs.list(query=words)] == [named]


def test_runs_beyond_the_limit_are_refused(service):
    service.store.runs._settings = service.settings.model_copy(
        update={"limits": service.settings.limits.model_copy(update={"runs": 2})}
    )
    runs = [service.a_run(), service.a_run()]
    with pytest.raises(Conflict, match="2 runs at most"):
        service.a_run()
    service.store.runs.delete(runs[0])
    service.a_run()


def test_old_runs_are_deleted_when_asked_and_demo_runs_never(service):
    old = service.a_run()
    service.report(old, step(0))
    service.clock.go(40 * 24 * 3600)
    new = service.a_run()
    assert service.store.tidy() == []
    service.store.settings = service.settings.model_copy(update={"retention_days": 30.0})
    assert service.store.tidy() == []  # a clock that is ahead, perhaps
    assert service.store.tidy() == [old]
    assert [run.id for run in service.store.runs.list()] == [new]


def test_a_clock_that_is_ahead_at_the_start_deletes_nothing(service):
    run = service.a_run()
    service.store.settings = service.settings.model_copy(update={"retention_days": 30.0})
    service.clock.go(400 * 24 * 3600)
    assert service.store.tidy() == []
    service.clock.go(-400 * 24 * 3600)  # it was set right
    assert service.store.tidy() == []
    service.clock.go(400 * 24 * 3600)
    assert service.store.tidy() == []
    assert [one.id for one in service.store.runs.list()] == [run]


def test_one_look_deletes_a_tenth_at_most_and_the_oldest_first(service, monkeypatch):
    monkeypatch.setattr("batchwright.service.store.part.FEW", 2)
    store = service.store
    runs = []
    for number in range(4):
        runs.append(service.a_run())
        store.profiles.add(f"{number}", make_profile())
        store.audit.note("me", f"{number}", "")
        store.jobs.cancel(store.jobs.submit(f"{number}", Job(), auto=True, owner="me").id)
        service.clock.go(1)
    store.settings = service.settings.model_copy(update={"retention_days": 30.0})
    service.clock.go(40 * 24 * 3600)
    store.tidy()
    assert set(store.tidy()) == set(runs[:2])
    assert [one.name for one in store.profiles.list()] == ["3", "2"]
    assert [one.action for one in store.audit.list()] == ["3", "2"]
    assert [one.name for one in store.jobs.list()] == ["3", "2"]
    assert set(store.tidy()) == set(runs[2:])


def test_what_a_deleted_run_held_is_removed_after_the_answer(service):
    run, kept = service.a_run(), service.a_run()
    for one in (run, kept):
        service.report(one, *(step(number) for number in range(5)))
    assert service.delete("report", f"/v1/runs/{run}").status_code == 204
    assert service.get("read", f"/v1/runs/{run}/records").status_code == 404
    assert service.app.state.remover.wait(300)
    assert runs_of_records(service) == {kept}
    body = {"name": "digits", "plan": make_plan().model_dump(mode="json")}
    again = service.put("report", f"/v1/runs/{run}", json=body)
    assert again.status_code == 409
    assert "report.json" in again.json()["detail"]


def test_a_service_that_starts_removes_what_was_left(service):
    run = service.a_run()
    service.report(run, step(0))
    service.store.runs.delete(run)
    with service.client:  # as a process that starts and ends
        until = time.monotonic() + 500
        while runs_of_records(service):
            assert time.monotonic() < until
            time.sleep(0.01)


def runs_of_records(service):
    with service.store.database.reading() as connection:
        return set(connection.exec_driver_sql("SELECT run_id FROM records").scalars())


def test_profiles_are_kept_and_given_back(service):
    identifier = service.store.profiles.add("box", make_profile())
    assert service.store.profiles.get(identifier) == make_profile()
    assert [(one.id, one.name) for one in service.store.profiles.list()] == [(identifier, "box")]
    service.store.profiles.delete(identifier)
    for ask in (service.store.profiles.get, service.store.profiles.delete):
        with pytest.raises(NotFound):
            ask(identifier)


def test_there_are_only_so_many_profiles(service):
    limits = service.settings.limits.model_copy(update={"profiles": 2})
    service.store.profiles._settings = service.settings.model_copy(update={"limits": limits})
    told = {"name": "box", "profile": make_profile().model_dump(mode="json")}
    first = service.post("submit", "/v1/profiles", json=told).json()["id"]
    assert service.post("submit", "/v1/profiles", json=told).status_code == 201
    full = service.post("submit", "/v1/profiles", json=told)
    assert full.status_code == 409
    assert "2 profiles at most" in full.json()["detail"]
    assert service.delete("submit", f"/v1/profiles/{first}").status_code == 204
    assert service.get("read", f"/v1/profiles/{first}").status_code == 404
    assert service.post("submit", "/v1/profiles", json=told).status_code == 201


def test_a_profile_is_deleted_by_its_owner_or_an_admin_only(service):
    told = {"name": "box", "profile": make_profile().model_dump(mode="json")}
    mine = service.post("submit", "/v1/profiles", json=told).json()["id"]
    other = {"authorization": f"Bearer {service.store.tokens.create('other', ['submit'])}"}
    before = service.store.profiles.add("of before profiles had owners", make_profile())
    for one in (mine, before):
        assert service.client.delete(f"/v1/profiles/{one}", headers=other).status_code == 403
    assert service.delete("submit", f"/v1/profiles/{mine}").status_code == 204
    assert service.delete("admin", f"/v1/profiles/{before}").status_code == 204
    assert service.store.profiles.list() == []
    deleted = [one.subject for one in service.store.audit.list() if one.action == "profile.delete"]
    assert deleted == [before, mine]


def test_old_profiles_and_notes_of_writes_are_deleted_when_asked(service):
    def kept():
        profiles = [one.name for one in service.store.profiles.list()]
        return profiles, [one.action for one in service.store.audit.list()]

    for name in ("old", "new"):
        service.store.profiles.add(name, make_profile())
        service.store.audit.note("me", name, "")
        service.clock.go(20 * 24 * 3600)
    service.store.tidy()
    assert kept() == (["new", "old"], ["new", "old"])
    service.store.settings = service.settings.model_copy(update={"retention_days": 30.0})
    service.store.tidy()
    service.store.tidy()
    assert kept() == (["new"], ["new"])


def test_writes_are_noted_with_who_and_what(service):
    run = "5f0c2d1e-8a44-4a0b-9d0e-2f6f7c1f0a11"
    body = {"name": "digits", "plan": make_plan().model_dump(mode="json")}
    assert service.put("report", f"/v1/runs/{run}", json=body).status_code == 200
    assert service.put("report", f"/v1/runs/{run}/end", json={"outcome": "stopped"}).is_success
    assert service.delete("admin", f"/v1/runs/{run}").status_code == 204
    noted = [(one.who, one.action, one.subject) for one in service.store.audit.list()]
    assert noted == [
        ("admin", "run.delete", run),
        ("report", "run.end", run),
        ("report", "run.introduce", run),
    ]


# ------------------------------------------------------------------------------------ the database


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def empty(request, tmp_path):
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/er/service.sqlite"
    return request.getfixturevalue("postgres")()


def test_the_schema_comes_from_nothing_and_is_what_the_tables_say(empty):
    database = Database(open_engine(empty))
    migrate(database)
    migrate(database)
    with database.reading() as connection:
        assert revision(connection) == HEAD
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def make_first(database):
    """The schema of the first version, as SQLite has it."""
    made = (Path(__file__).parent / "golden" / "service_0001.sql").read_text(encoding="utf-8")
    made = made if database.is_sqlite else made.replace(" WITHOUT ROWID", "")
    with database.writing() as connection:
        for statement in made.split(";\n")[:-1]:
            connection.exec_driver_sql(statement)


def test_a_database_of_the_first_version_keeps_what_it_has(empty):
    database = Database(open_engine(empty))
    make_first(database)
    with database.writing() as connection:
        connection.execute(
            text("INSERT INTO profiles (id, name, created, body) VALUES ('a', 'box', 1, :body)"),
            {"body": make_profile().model_dump_json()},
        )
    database.close()
    store = Store.open(Settings(database=empty))
    store.check()
    with store.database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert store.profiles.get("a") == make_profile()
    assert store.profiles.owner("a") == ""
    store.close()


def test_jobs_of_the_first_version_are_live_or_have_ended(empty):
    database = Database(open_engine(empty))
    make_first(database)
    common = {"name": "a", "owner": "me", "auto": True, "approved": False, "cancelling": False}
    common |= {"created": 1.0, "job": Job().model_dump_json(), "attempts": 1, "lost": 2}
    names = ", ".join(common)
    values = ", ".join(f":{name}" for name in common)
    with database.writing() as connection:
        for number, state in enumerate(("queued", "done", "failed", "cancelled")):
            connection.execute(
                text(
                    f"INSERT INTO jobs (id, state, changed, {names}) "  # noqa: S608
                    f"VALUES ('{uuid.UUID(int=number)}', '{state}', {10 + number}, {values})"
                ),
                common,
            )
    database.close()
    store = Store.open(Settings(database=empty))
    with store.database.reading() as connection:
        live = connection.execute(text("SELECT state FROM jobs WHERE ended IS NULL")).all()
    assert [one.state for one in live] == ["queued"]
    assert {one.state for one in store.jobs.list()} == {"queued", "cancelled", "failed", "done"}
    store.agents.introduce(AgentIntroduction(name="one", allow=()), "me")
    assert store.jobs.lease("one").number == 2
    store.close()


def test_several_that_start_at_once_make_one_schema(empty):
    failures = []

    def start():
        try:
            store = Store.open(Settings(database=empty))
            store.check()
            store.close()
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_opening_waits_while_somebody_else_changes_a_new_file(tmp_path, monkeypatch):
    """SQLite itself refuses at once what makes the file one with a write-ahead log."""
    file, paused = tmp_path / "s.sqlite", threading.Event()
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")

    def end_the_other(seconds):
        if not paused.is_set():
            other.execute("COMMIT")
        paused.set()

    monkeypatch.setattr("batchwright.service.database.engine.time.sleep", end_the_other)
    Store.open(Settings(database=f"sqlite:///{file}")).close()
    assert paused.is_set()
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_file_that_stays_locked_is_refused_at_last(tmp_path, monkeypatch):
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr("batchwright.service.database.engine.BUSY_SECONDS", 0.0)
    with pytest.raises(BatchwrightError, match="database is locked"):
        Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    other.close()


@pytest.mark.slow
def test_processes_that_start_at_once_make_one_schema(empty):
    code = """if True:
        import sys
        from batchwright.service.settings import Settings
        from batchwright.service.store import Store
        settings = Settings(database=sys.argv[1])
        print("ready", flush=True)
        sys.stdin.readline()
        Store.open(settings).close()
    """
    words = [sys.executable, "-c", code, empty]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    servers = [subprocess.Popen(words, **ends) for _ in range(3)]
    for server in servers:
        assert server.stdout.readline() == "ready\n"
    for server in servers:
        server.stdin.write("go\n")
        server.stdin.flush()
    assert [server.communicate(timeout=500) and server.returncode for server in servers] == [0] * 3


def test_a_second_store_of_a_file_ends_no_locks_of_the_first(tmp_path):
    """They are the process's: whoever closes the file ends them, and another process that is the
    last one then removes the log in use.
    """
    settings = Settings(database=f"sqlite:///{tmp_path}/s.sqlite")
    first = Store.open(settings)
    first.audit.note("first", "before", "")
    second = Store.open(settings)
    code = (
        "import sqlite3, sys\n"
        "other = sqlite3.connect(sys.argv[1])\n"
        "other.execute('SELECT count(*) FROM audit').fetchall()\n"
        "other.close()\n"
    )
    file = str(tmp_path / "s.sqlite")
    subprocess.run([sys.executable, "-c", code, file], check=True, timeout=500)
    first.audit.note("first", "after", "")
    second.audit.note("second", "after", "")
    assert [one.who for one in first.audit.list()] == ["second", "first", "first"]
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("SELECT count(*) FROM audit").fetchone() == (3,)
    first.close()
    second.close()


def test_a_newer_database_is_refused(tmp_path):
    settings = Settings(database=f"sqlite:///{tmp_path}/s.sqlite")
    store = Store.open(settings)
    with store.database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'f9999'"))
    with pytest.raises(BatchwrightError, match="f9999"):
        store.check()
    store.close()
    with pytest.raises(BatchwrightError, match="newer Batchwright"):
        Store.open(settings)


@pytest.mark.parametrize(("former", "step"), [(None, "stamp"), ("0001", "upgrade")])
def test_a_migration_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, former, step):
    from alembic import command

    database = Database(open_engine(f"sqlite:///{tmp_path}/s.sqlite"))
    if former:
        make_first(database)
    done = getattr(command, step)

    def failing(config, head):
        done(config, head)
        raise ZeroDivisionError

    def tables():
        with database.reading() as connection:
            assert revision(connection) == former
            return connection.execute(text("SELECT sql FROM sqlite_master")).all()

    before = tables()
    assert bool(before) == bool(former)
    monkeypatch.setattr(command, step, failing)
    with pytest.raises(ZeroDivisionError):
        migrate(database)
    monkeypatch.undo()
    assert tables() == before
    migrate(database)
    database.close()


def test_the_newest_migration_is_the_one_that_is_known(tmp_path):
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "batchwright.service.database:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_sqlite_syncs_each_commit_and_keeps_its_files_private(tmp_path):
    store = Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    with store.database.reading() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    store.tokens.create("x", ["read"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("s.sqlite", "s.sqlite-wal", "s.sqlite-shm"), 0o600)
    store.close()


def test_a_transaction_inside_another_is_a_mistake_that_shows_at_once(service):
    with service.store.database.writing(), pytest.raises(RuntimeError, match="inside another"):
        service.store.audit.note("me", "x", "y")
    service.store.audit.note("me", "x", "y")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://me:secret@host/name", "mysql:... is no database"),
        ("nothing", "nothing:... is no database"),
        ("", "is no database"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_what_is_no_database_is_refused_in_one_line(url, told):
    with pytest.raises(BatchwrightError, match=told) as refusal:
        Store.open(Settings(database=url))
    assert "secret" not in str(refusal.value)


def test_a_database_that_cannot_be_opened_is_named_without_its_password(tmp_path):
    (tmp_path / "s.sqlite").write_text("this is no database, and it is long enough to be sure")
    with pytest.raises(BatchwrightError, match="cannot open the database"):
        Store.open(Settings(database=f"sqlite:///{tmp_path}/s.sqlite"))
    url = f"postgresql://me:secret@/name?host={tmp_path}"
    with pytest.raises(BatchwrightError, match="is it running") as refusal:
        Store.open(Settings(database=url))
    assert "secret" not in str(refusal.value)
    assert "secret" not in shown(url)
    told = shown("postgresql://me@h/name?password=secret&sslpassword=secret&sslmode=require")
    assert told == "postgresql://me@h/name?password=...&sslmode=require&sslpassword=..."


# --------------------------------------------------- what PostgreSQL lets two do at the same time


@pytest.mark.slow
def test_a_run_that_is_introduced_twice_at_once_is_there_once(postgres, monkeypatch):
    store = Store.open(Settings(database=postgres()))
    together, look = threading.Barrier(2), runs_module._row

    def looked(*given, **named):
        found = look(*given, **named)
        if found is None:
            together.wait(60)
        return found

    monkeypatch.setattr(runs_module, "_row", looked)
    run, told = str(uuid.uuid4()), RunIntroduction(name="digits", plan=make_plan())
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: store.runs.introduce(run, told, "me"), range(2))]
    assert [one.id for one in found] == [run, run]
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["runs", "jobs", "profiles", "artifact_bytes"])
def test_of_two_that_add_the_last_one_at_once_one_is_refused(postgres, monkeypatch, what, tmp_path):
    """Without a lock both have counted before either has added."""
    settings = Settings(database=postgres(), artifacts=str(tmp_path / "artifacts"))
    limits = {"runs": 1, "profiles": 1, "artifact_bytes": 10}
    settings = settings.model_copy(update={"limits": settings.limits.model_copy(update=limits)})
    service = Service(Store.open(settings), settings, None)
    store, counted = service.store, threading.Barrier(2)

    def meet(look):
        def looked(*given, **named):
            found = look(*given, **named)
            with suppress(threading.BrokenBarrierError):
                counted.wait(2)  # the other may wait until this one is done
            return found

        return looked

    for module in (runs_module, jobs_module, profiles_module):
        if module.__name__.endswith(what):
            monkeypatch.setattr(module, "count", meet(module.count))
    leases = [leased(service, name) for name in "ab"] if what == "artifact_bytes" else [None] * 2
    limits = {"open_jobs": 1} if what == "jobs" else {}
    limits = settings.limits.model_copy(update=limits)
    store.jobs._settings = settings.model_copy(update={"limits": limits})
    monkeypatch.setattr(store.artifacts, "_room", meet(store.artifacts._room))
    told = RunIntroduction(name="digits", plan=make_plan())
    adding = {
        "runs": lambda _: store.runs.introduce(str(uuid.uuid4()), told, "me"),
        "jobs": lambda _: store.jobs.submit("a job", Job(), auto=True, owner="me"),
        "profiles": lambda _: store.profiles.add("mine", make_profile()),
        "artifact_bytes": lambda lease: store.artifacts.begin(
            lease.job.id, "best.pt", lease.key, size=10, sha256="0" * 64
        ),
    }

    def add(lease):
        try:
            adding[what](lease)
        except (Conflict, NoRoom, TooMany):
            return "refused"
        return "added"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(add, leases)) == ["added", "refused"]
    store.close()


@pytest.mark.slow
def test_of_two_that_make_a_token_of_one_name_at_once_one_is_told_of_the_other(postgres):
    store, together = Store.open(Settings(database=postgres())), threading.Barrier(2)

    def make(name):
        together.wait(60)
        try:
            return store.tokens.create(name, ["read"])
        except Conflict:
            return ""

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            made = [*pool.map(make, [f"token {number}"] * 2)]
            assert made.count("") == 1
            assert store.tokens.find("".join(made))
    store.close()
