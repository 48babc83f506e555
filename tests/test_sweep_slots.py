"""Room for cells: cores and GPUs are all used, and none is given out twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import JobError
from batchwright.workflows.sweep.slots import Machine, Slots, read_at_once
from example_counts import examples

FOUR_GPUS = Machine(16, ("0", "1", "2", "3"))


def filled(slots, widths):
    """What is taken if cells of these widths come in order."""
    return [slots.take(width) for width in widths]


def test_small_cells_have_a_core_each_and_threads_only_where_there_are_fewer_than_cores():
    many = Slots(Machine(4), [1] * 10, "auto")
    assert many.threads == 1
    assert filled(many, [1] * 5) == [(), (), (), (), None]
    few = Slots(Machine(8), [1] * 3, "auto")
    assert few.threads == 2
    assert filled(few, [1] * 4)[:3] == [(), (), ()]
    assert Slots(Machine(8), [1], "auto").threads == 8


def test_a_cell_of_several_workers_takes_a_core_for_each():
    slots = Slots(Machine(4), [2, 2, 1], "auto")
    assert filled(slots, [2, 2, 1]) == [(), (), None]
    slots.give_back(2, ())
    assert slots.take(1) == ()


def test_a_cell_wider_than_the_machine_runs_alone():
    slots = Slots(Machine(2), [4, 1], "auto")
    assert filled(slots, [4, 1]) == [(), None]
    slots.give_back(4, ())
    assert slots.take(1) == ()


def test_as_many_at_once_as_asked_share_the_cores():
    slots = Slots(Machine(8), [1] * 10, 2)
    assert slots.threads == 4
    assert filled(slots, [1] * 3) == [(), (), None]
    assert Slots(Machine(2), [4], 1).threads == 1


def test_each_worker_has_a_gpu_of_its_own():
    slots = Slots(FOUR_GPUS, [2, 2, 1], "auto")
    assert filled(slots, [2, 1, 2]) == [("0", "1"), ("2",), None]
    slots.give_back(2, ("0", "1"))
    assert slots.take(2) == ("0", "1")
    assert slots.threads == 4


def test_gpus_are_shared_only_where_so_many_cells_are_asked_for():
    slots = Slots(Machine(16, ("5",)), [1] * 4, 3)
    assert filled(slots, [1] * 4) == [("5",), ("5",), ("5",), None]
    with pytest.raises(JobError, match="need 6 GPUs, and there are 4: give at_once=2 or auto"):
        Slots(FOUR_GPUS, [2], 3)


def test_more_processes_than_cores_are_refused():
    with pytest.raises(
        JobError, match=r"at_once=3 runs of 1 worker need 3 cores.*give at_once=2 or auto"
    ):
        Slots(Machine(2), [1], 3)
    for value in (0, -1, "many", "0", 1.5, "\N{SUPERSCRIPT TWO}", "9" * 5000):
        with pytest.raises(JobError, match="is no number of runs"):
            read_at_once(value)
    assert (read_at_once("auto"), read_at_once("2"), read_at_once(2)) == ("auto", 2, 2)


@examples(200)
@given(
    cores=st.integers(1, 16),
    gpus=st.integers(0, 4),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    data=st.data(),
)
def test_no_core_and_no_gpu_is_given_out_twice(cores, gpus, widths, data):
    machine = Machine(cores, tuple(map(str, range(gpus))))
    slots = Slots(machine, widths, "auto")
    running, waiting = [], list(widths)
    while waiting or running:
        width = waiting[0] if waiting else None
        taken = None if width is None else slots.take(width)
        if taken is None:
            assert running, "nothing runs, and nothing may start"
            slots.give_back(*running.pop(data.draw(st.integers(0, len(running) - 1))))
            continue
        running.append((waiting.pop(0), taken))
        used = [gpu for _, some in running for gpu in some]
        assert len(used) == len(set(used))
        if len(running) > 1:
            assert sum(width for width, _ in running) * slots.threads <= cores
            assert not gpus or len(used) == sum(width for width, _ in running)
