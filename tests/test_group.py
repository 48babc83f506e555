"""Finding each other, missing each other, and recognizing a launch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from batchwright.distributed import exit_reports, heartbeat, rendezvous
from batchwright.distributed.group import Group
from batchwright.distributed.heartbeat import Presence, RollCall, machine_name
from batchwright.distributed.joining import environments
from batchwright.distributed.joining.environments import Started
from batchwright.distributed.joining.gathering import Gathering
from batchwright.distributed.processes import LAUNCH
from batchwright.distributed.rendezvous import (
    choose_interface,
    interface_towards,
    meet,
    own_address,
)
from batchwright.errors import LostWorkerError, TrainingError
from batchwright.workload.host import collective_interface
from gloo import SECONDS, Worker, free_port

# ------------------------------------------------------------------------------------- who answers


@pytest.fixture
def roll_calls():
    """Three workers' roll calls over one store, within this process."""
    store = dist.HashStore()
    present = [Presence(f"node{r}/cpu:0", "", os.getpid(), f"token{r}") for r in range(3)]
    calls = [RollCall(store, rank, present, "agent:1") for rank in range(3)]
    yield calls
    for call in calls:
        call.close()


def fall_silent(call):
    """Beat no longer, and leave no word: what a stopped process does."""
    call._ending.set()
    call._thread.join()


@pytest.mark.slow
def test_a_silent_worker_is_named_with_its_place_and_silence(roll_calls):
    fall_silent(roll_calls[2])
    for call in roll_calls[:2]:
        call.exchanging = True
    said = r"worker 2 \(node2/cpu:0\) has been silent for ([2-9]|\d{2,}) s"  # 2 unless all is slow
    assert re.fullmatch(said, roll_calls[0].inquire())


def test_a_worker_that_misses_some_beats_is_not_given_up(roll_calls, monkeypatch):
    """It may be busy: nothing has failed yet, and to give it up ends the run."""
    fall_silent(roll_calls[2])
    now = [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for call in roll_calls[:2]:
        fall_silent(call)  # or it would ask for the time
    call = roll_calls[0]
    for now[0], missed in ((0.0, False), (3.0, False), (11.0, True)):
        roll_calls[1]._store.set("beat/1", f"beat at {now[0]}")
        assert call.misses_one() is missed


def test_a_worker_that_left_is_named_at_once(roll_calls):
    roll_calls[1].close()
    assert roll_calls[0].inquire() == "worker 1 (node1/cpu:0) left the run"


def test_a_worker_that_left_for_an_error_is_named_with_it(roll_calls):
    roll_calls[1].close("ValueError: no such thing")
    told = "worker 1 (node1/cpu:0) left the run: ValueError: no such thing"
    assert roll_calls[0].inquire() == told


@pytest.mark.slow
def test_a_worker_that_beats_but_does_not_come_is_named(roll_calls):
    for call in roll_calls[:2]:
        call.exchanging = True
    said = roll_calls[0].inquire()
    assert said.startswith("worker 2 (node2/cpu:0) answers, but has not come to an exchange for ")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_of_this_machine_that_has_ended_is_named_at_once():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # ended, but not yet waited for
    present = [
        Presence(f"node/cpu:{rank}", machine_name(), process, f"token{rank}")
        for rank, process in enumerate((os.getpid(), ended.pid, os.getpid()))
    ]
    call = RollCall(dist.HashStore(), 0, present, "agent:1")
    try:
        assert call.inquire() == "worker 1 (node/cpu:1) ended without a word"
        ended.wait()
        assert call.inquire() == "worker 1 (node/cpu:1) ended without a word"
    finally:
        call.close()


def test_nobody_is_named_when_all_failed_alike(roll_calls, monkeypatch):
    monkeypatch.setattr(heartbeat, "MISSED_BEATS", 1000)  # a thread may begin late
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", SECONDS)
    found = []
    threads = [threading.Thread(target=lambda c=c: found.append(c.inquire())) for c in roll_calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["", "", ""]


@pytest.fixture
def quick_calls(monkeypatch):
    """Three workers' roll calls, whose store goes with worker 0; they beat often."""
    monkeypatch.setattr(heartbeat, "MISSED_BEATS", 10_000)  # a thread may begin late
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "_ANSWER_SECONDS", SECONDS)
    store = dist.HashStore()
    present = [Presence(f"node{r}/cpu:0", "", os.getpid(), f"token{r}") for r in range(3)]
    calls = [RollCall(store, rank, present) for rank in range(3)]
    yield calls
    for call in calls:
        call.close()


def test_why_worker_0_left_is_known_also_when_its_store_has_gone_with_it(quick_calls, monkeypatch):
    first, *others = quick_calls
    first.close("ValueError: no such thing")
    for call in others:
        monkeypatch.setattr(call, "_inquire", refuses)
        assert call.inquire() == "worker 0 (node0/cpu:0) left the run: ValueError: no such thing"


def refuses():
    raise RuntimeError("Connection reset by peer")


def test_worker_0_waits_for_nobody_that_has_left_before(quick_calls):
    first, second, third = quick_calls
    third.close()
    fall_silent(second)
    second.say_failed()
    first.close("ValueError: no such thing")  # else it would wait for minutes
    assert second._read("heard/1") is None


def meeting(calls, rank, what="evaluates"):
    """The error with which a worker ends that begins something and waits for the others."""
    calls[rank].announce(what)
    try:
        calls[rank].monitored_barrier(SECONDS)
    except (LostWorkerError, TrainingError) as error:
        return error


def test_workers_meet_once_all_have_come_to_the_same(quick_calls):
    for _ in range(3):
        with ThreadPoolExecutor() as threads:
            found = [threads.submit(meeting, quick_calls, rank) for rank in range(3)]
        assert [one.result() for one in found] == [None] * 3
    assert not quick_calls[0]._store.check(["met/1/evaluates/0"])  # or they would become many


@pytest.mark.parametrize(
    ("before", "what", "doing"),
    [
        (0, "has left the loop", "takes a step"),
        (0, "evaluates", "ends an epoch"),
        (2, "evaluates", "evaluates"),
    ],
)
def test_a_worker_that_goes_its_own_way_learns_what_another_does(before, what, doing, quick_calls):
    for _ in range(before + 1):  # more than this one, or something else
        quick_calls[1].announce(doing)
    quick_calls[2].announce(what)
    quick_calls[2]._come()
    error = meeting(quick_calls, 0, what)
    assert isinstance(error, TrainingError)
    said = f"worker 0 (node0/cpu:0) {what}, and worker 1 (node1/cpu:0) {doing}: call session.step()"
    assert str(error).startswith(said)


def test_who_waits_for_the_others_learns_that_one_is_gone(quick_calls):
    quick_calls[2].close("ValueError: no such thing")
    error = meeting(quick_calls, 1)
    assert isinstance(error, LostWorkerError)
    assert str(error).endswith("worker 2 (node2/cpu:0) left the run: ValueError: no such thing")


def test_who_waits_for_the_others_does_not_wait_for_ever(quick_calls, monkeypatch):
    monkeypatch.setattr(heartbeat, "MISSED_BEATS", 1)
    quick_calls[0].announce("evaluates")
    late = (
        r"\) evaluates, and worker 1 \(.*\), worker 2 \(.*\) did not within 0\.05 s: worker [12] "
    )
    with pytest.raises(LostWorkerError, match=late):
        quick_calls[0].monitored_barrier(0.05)
    assert not quick_calls[0]._failed  # or the others could not read why it leaves


def test_who_waits_for_the_others_learns_that_one_is_silent(quick_calls, monkeypatch):
    """As where it was killed on another host: nothing in the store says so."""
    first, second, third = quick_calls
    third.announce("evaluates")
    third._come()
    fall_silent(second)
    first._patience = 0.0
    monkeypatch.setattr(first, "loss", lambda: "one is silent")
    first.announce("evaluates")
    with pytest.raises(LostWorkerError, match="one is silent"):
        first.monitored_barrier(SECONDS)


def test_who_has_met_the_others_and_goes_on_has_not_gone_another_way(quick_calls, monkeypatch):
    """It does so between two looks of this one, and its beat tells of what comes next."""
    first, *others = quick_calls
    read = first._read

    def after_the_others(key):
        if key == "beat/1" and not others[0]._met:
            for call in others:
                call.announce("has left the loop")
                call._come()
                call.announce("ends an epoch")
                call._beat()
        return read(key)

    monkeypatch.setattr(first, "_read", after_the_others)
    assert meeting(quick_calls, 0, "has left the loop") is None


def test_who_waits_asks_for_all_the_others_at_once(quick_calls, monkeypatch):
    """One store answers all workers, and each asks some times a second."""
    first, *others = quick_calls
    store, asked = first._store, []

    def check(keys):
        if keys[0].startswith("met/"):
            asked.append(len(keys))
            if len(asked) == 5:
                for call in others:
                    call.announce("evaluates")
                    call._come()
        return store.check(keys)

    counted = SimpleNamespace(check=check, set=store.set, get=store.get)
    monkeypatch.setattr(first, "_store", counted)
    assert meeting(quick_calls, 0) is None
    assert asked == [3] * 5


@pytest.mark.parametrize(("of_user", "waits"), [(500, 500.0), (3, 10.0)])
def test_in_a_group_of_the_users_own_its_timeout_holds_where_workers_meet(of_user, waits):
    store, limit = dist.HashStore(), timedelta(seconds=of_user)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    try:
        group, given = Group(torch.device("cpu"), 10.0), []
        backend = dist.distributed_c10d._get_default_group()._get_backend(group.device)
        if not hasattr(backend, "options"):
            pytest.skip("PyTorch is too old to tell it")
        group._roll_call = SimpleNamespace(monitored_barrier=given.append)
        group.monitored_barrier()
    finally:
        dist.destroy_process_group()
    assert given == [waits]


def test_a_roll_call_gives_way_to_the_one_before(roll_calls):
    """Of a group within a command of several processes, which watch each other besides."""
    assert RollCall.current is roll_calls[2]
    roll_calls[1].close()
    assert RollCall.current is roll_calls[2]
    roll_calls[2].close()
    assert RollCall.current is roll_calls[0]


def stand_ready(rank):
    """All meet at once, however long each took to start."""


def survive(rank, victim, number, agent, seconds):
    if agent:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    group = Group(torch.device("cpu"), seconds)
    group.barrier()
    group.barrier()
    if rank == victim:
        os.kill(os.getpid(), number)
    try:
        with pytest.raises(LostWorkerError) as told:
            group.barrier()
    finally:
        group.close()
    return str(told.value)


def with_a_launcher_each(rank):
    os.environ["LOCAL_RANK"] = "0"
    group = Group(torch.device("cpu"), SECONDS)
    named = [group._roll_call._name(other) for other in range(group.size)]
    group.close()
    return group.places, named


@pytest.mark.slow
def test_workers_of_several_launchers_on_one_host_have_places_of_their_own(crew):
    """Speeds and shares are kept by place: of two with one, only the last would have any."""
    first = f"{os.uname().nodename}/cpu:0"
    places = first, f"{first}#2", f"{first}#3"
    named = [f"worker {rank} ({place})" for rank, place in enumerate(places)]
    assert crew.together(with_a_launcher_each, workers=3) == [(places, named)] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "victim", "number", "agent", "seconds", "said"),
    [
        (3, 2, signal.SIGSTOP, True, 10.0, "worker 2 ({}/cpu:2) has been silent for "),
        (2, 0, signal.SIGKILL, False, SECONDS, "worker 0 ({}/cpu:0), which holds the store"),
    ],
)
def test_survivors_name_the_worker_that_a_signal_hit(workers, victim, number, agent, seconds, said):
    server = (
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if agent else None
    )
    port = server.port if server else free_port()
    crew = [Worker(rank) for rank in range(workers)]
    try:
        for one in crew:
            one.send(stand_ready, workers=workers, port=port)
        for one in crew:
            one.answer("to start")
        for one in crew:
            one.send(survive, victim, number, agent, seconds, workers=workers, port=port)
        for rank, one in enumerate(crew):
            if rank != victim:
                assert said.format(os.uname().nodename) in one.answer("to name who is lost")
    finally:
        for one in crew:
            one.kill()


# --------------------------------------------------------------------------------------- meeting


@pytest.fixture
def agent_store(monkeypatch):
    """A store that this process holds, as an agent would."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def start(ranks, size, timeout=300.0):
    """What each of ``ranks`` finds: the token of worker 0 once they have met, or an error."""
    found = {}

    def join(rank):
        try:
            store = meet(rank, size, timeout)
            if rank == 0:
                store.set("token", os.urandom(4).hex())
            found[rank] = store.get("token")
        except LostWorkerError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # the others come first: they find what an earlier start has left
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_each_start_gets_a_part_of_the_store_for_itself(agent_store):
    whole = start([2, 1, 0], 3)
    fewer = start([1, 0], 2)
    more = start([3, 2, 1, 0], 4)
    tokens = [set(found.values()) for found in (whole, fewer, more)]
    assert [len(each) for each in tokens] == [1, 1, 1]
    assert len(set.union(*tokens)) == 3


@pytest.mark.slow
def test_those_who_do_not_come_are_named_and_spoil_no_later_start(agent_store):
    assert start([1, 0], 3, timeout=5.0) == dict.fromkeys(
        (0, 1), "worker 2 did not come to the start within 5 s"
    )
    assert len(set(start([1, 0], 2).values())) == 1


@pytest.mark.parametrize("ranks", [[0], [1]], ids=["worker 0", "another"])
def test_who_meets_does_not_wait_for_a_worker_that_is_known_to_be_gone(
    agent_store, roll_calls, ranks
):
    roll_calls[2].close()
    roll_calls[1].close()
    said = "lost contact with another worker: worker 1 (node1/cpu:0) left the run, worker 2 "
    assert start(ranks, 3)[ranks[0]].startswith(said)


def test_who_comes_late_has_the_whole_limit_for_what_follows(agent_store, monkeypatch):
    connect = rendezvous._connect
    left = lambda timeout, **how: connect(min(timeout, 5.0), **how)  # noqa: E731
    monkeypatch.setattr(rendezvous, "_connect", left)
    first = threading.Thread(target=meet, args=(0, 2, 300.0))
    first.start()
    assert meet(1, 2, 300.0).timeout == timedelta(seconds=300)
    first.join()


def waits_for_orders(rank, number):
    """Of worker 0, which holds the store and gets a signal once both have met."""
    port = int(os.environ["MASTER_PORT"])
    here = Started(rank, 2, rank, 2, "localhost", port, by="torchrun")
    with Gathering(here, versions={}, words="run") as joined:
        if rank == 0:
            joined._hear("met")
            os.kill(os.getpid(), number)
        joined._tell("met", "")
        joined._store._limit = 1.0
        with pytest.raises(LostWorkerError) as told:
            joined.follow(lambda order: None)
    return str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_ever_at_the_store_of_a_process_that_is_gone_or_stands_still(number):
    crew, port = [Worker(rank) for rank in range(2)], free_port()
    try:
        for one in crew:
            one.send(waits_for_orders, number, workers=2, port=port)
        assert crew[1].answer("to miss worker 0").startswith("lost contact with ")
    finally:
        for one in crew:
            one.kill()


def noting(rank, store):
    """A gathering of three, seen by one of them."""
    one = Gathering.__new__(Gathering)
    one.started = Started(rank, 3, rank, 3, "localhost", free_port(), by="torchrun")
    one.members = ("worker 0 (a)", "worker 1 (b)", "worker 2 (c)")
    one._store = store
    return one


@pytest.mark.parametrize("noted", [(1,), (2, 1), (2,)])
def test_the_error_behind_a_loss_is_raised_in_its_place(noted):
    """Others that only lost the same worker may be the first to note something."""
    store = dist.HashStore()
    for rank in noted:
        found = KeyError("of the user's") if rank == 1 else LostWorkerError("lost contact")
        noting(rank, store).note_failure(found)
    lead = noting(0, store)
    lead.note_failure(KeyError("of worker 0, which raises it anyway"))
    with pytest.raises(LostWorkerError) as told, lead.explaining():
        raise LostWorkerError("lost contact with another worker: worker 1 (b) left the run")
    assert str(told.value).startswith("worker 1 (b): KeyError" if 1 in noted else "lost contact")


def leaves_for_an_error(rank, folder):
    """Worker 1; worker 0 returns what it hears of it, and what is reported by then."""
    os.environ[exit_reports.ERRORS_FOLDER] = folder
    try:
        group = Group(torch.device("cpu"), SECONDS)
        if rank:
            return group.close(ValueError("no such\nthing"))
        with pytest.raises(LostWorkerError) as told:
            group.barrier()
        found = exit_reports.reports_in(Path(folder))
        group.close(told.value)
    finally:
        del os.environ[exit_reports.ERRORS_FOLDER]
    return str(told.value), [(one["rank"], one["message"]) for one in found]


@pytest.mark.slow
def test_who_misses_a_worker_can_know_why_it_left(tmp_path):
    crew, port = [Worker(rank) for rank in range(2)], free_port()
    try:
        for one in crew:
            one.send(leaves_for_an_error, str(tmp_path), workers=2, port=port)
        heard, reported = crew[0].answer("to miss worker 1")
    finally:
        for one in crew:
            one.kill()
    assert ") left the run: ValueError: no such thing (" in heard
    assert reported == [(1, "ValueError: no such thing")]
    assert {one["secondary"] for one in exit_reports.reports_in(tmp_path)} == {True, False}


def leaves_with_its_store(rank, folder):
    """Worker 0, which holds the store, leaves; worker 1 looks once its process is gone, too."""
    group = Group(torch.device("cpu"), SECONDS)
    if not rank:
        heartbeat.MISSED_BEATS, heartbeat._ANSWER_SECONDS = 10_000, SECONDS
        return group.close(ValueError("no such thing"))
    while not (folder / "gone").exists():
        time.sleep(0.01)
    with pytest.raises(LostWorkerError) as told:
        group.barrier()
    group.close(told.value)
    return str(told.value)


@pytest.mark.slow
def test_worker_0_does_not_take_its_reason_with_it(tmp_path):
    crew, port = [Worker(rank) for rank in range(2)], free_port()
    try:
        for one in crew:
            one.send(leaves_with_its_store, tmp_path, workers=2, port=port)
        crew[0].answer("to leave")
        crew[0].kill()
        (tmp_path / "gone").touch()
        said = "worker 0 ({}/cpu:0) left the run: ValueError: no such thing ("
        assert said.format(os.uname().nodename) in crew[1].answer("to miss worker 0")
    finally:
        for one in crew:
            one.kill()


def test_a_group_that_is_left_for_an_error_notes_it_for_worker_0(monkeypatch):
    noted = []
    monkeypatch.setattr(Gathering, "current", SimpleNamespace(note_failure=noted.append))
    group = Group(torch.device("cpu"))
    group.close()
    group.close(error := ValueError("no such thing"))
    group.close(SystemExit(3))
    group.close(LostWorkerError("of worker 0"))
    assert noted == [error]


def test_on_one_host_gloo_uses_the_loopback_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "somewhere.invalid")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == collective_interface()


def test_what_the_user_says_of_the_interface_stands(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_interface_follows_the_route():
    assert interface_towards("127.0.0.1") == collective_interface()
    assert interface_towards("nowhere.invalid") is None


def test_in_a_network_without_a_way_out_a_host_whose_name_is_its_loopback_takes_its_only_other(
    monkeypatch,
):
    """As the first of several hosts: others would look for it at their own loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"MASTER_ADDR": "node1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    routes = {"node1": "127.0.0.1"}
    monkeypatch.setattr(rendezvous, "_address_towards", lambda to, family=0: routes.get(to))
    cards = {collective_interface(): "127.0.0.1", "ib0": "10.0.0.7"}
    monkeypatch.setattr(rendezvous, "_addresses", lambda: cards)
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert own_address() == "10.0.0.7"


def test_a_host_of_a_network_with_ipv6_alone_has_its_address_there(monkeypatch):
    for name, value in {"MASTER_ADDR": "node1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    routes = {("node1", 0): "fd00::7"}
    monkeypatch.setattr(
        rendezvous, "_address_towards", lambda to, family=0: routes.get((to, family))
    )
    assert own_address() == "fd00::7"


# ------------------------------------------------------------------------------ the same launch


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """What `started_again` says in a new process of an agent, which is then noted."""

    def call(agent, process, folder=tmp_path / "run"):
        report = f"/tmp/torchelastic_x/{agent}/attempt_0/0/error.json"  # noqa: S108 - only a name
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", report)
        monkeypatch.setattr(environments, "_process", process)
        alone = Group(torch.device("cpu"))
        again = alone.started_again(folder)
        alone.note_start(folder, again=again)
        return again

    return call


def test_a_restart_by_the_same_agent_is_recognized(opened):
    assert [opened("one", "first"), opened("one", "second"), opened("one", "third")] == [
        False,
        True,
        True,
    ]


def test_another_launch_or_the_same_process_is_no_restart(opened):
    assert not opened("one", "first")
    assert not opened("one", "first")
    assert not opened("two", "second")


@pytest.mark.parametrize("written", ["metrics.jsonl", "checkpoints/best.pt"])
def test_a_run_of_another_launch_is_not_taken_over_by_restarting(opened, tmp_path, written):
    opened("one", "first")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / written).touch()
    assert not opened("two", "second")
    assert not opened("two", "third")  # its agent started it again after it was refused
    assert opened("one", "fourth")


def test_a_restart_by_our_own_launcher_is_recognized(opened, monkeypatch):
    for launch, process, again in (("a", "one", False), ("a", "two", True), ("b", "three", False)):
        monkeypatch.setenv(LAUNCH, launch)
        assert opened("torchrun's, which is not looked at", process) is again


def test_without_a_launcher_nothing_is_noted(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    alone = Group(torch.device("cpu"))
    assert not alone.started_again(tmp_path / "run")
    alone.note_start(tmp_path / "run", again=False)
    assert not (tmp_path / "run").exists()


def test_who_is_refused_has_not_noted_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH, "one")
    Group(torch.device("cpu")).started_again(tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_worker_knows_its_place():
    assert Group(torch.device("cpu")).places == (f"{os.uname().nodename}/cpu:0",)
