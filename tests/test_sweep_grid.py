"""What a grid means, and what is refused of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, JobError
from batchwright.records import Job
from batchwright.workflows.sweep.grid import cells_of, read_grid, seeds_of, widened, words_of_grid

JOB = Job(global_batch=64)


def values(**grid):
    return {one.key: one.values for one in read_grid(JOB, grid)}


def test_values_are_those_that_the_job_holds():
    grid = words_of_grid(["warmup_epochs=0, 5,auto", "clip_norm=null,1"])
    found = {one.key: one.values for one in read_grid(JOB, grid)}
    assert found == {"warmup_epochs": (0.0, 5.0, "auto"), "clip_norm": (None, 1.0)}


def test_a_yaml_list_holds_values_with_commas():
    assert values(resolutions="[[32], [24, 32]]") == {"resolutions": ([32], [24, 32])}
    assert values(resolutions=[(32,), (24, 32)]) == values(resolutions="[[32], [24, 32]]")
    assert values(**{"ags.mode": "[off, gain]"}) == {"ags.mode": ("off", "gain")}
    assert values(resolutions="24,32") == {"resolutions": ([24], [32])}


def test_lists_in_brackets_are_values_and_without_them_the_error_says_how():
    pairs = {"betas": ([0.9, 0.95], [0.9, 0.99])}
    assert values(betas="[0.9,0.95],[0.9,0.99]") == pairs
    assert values(betas="[[0.9, 0.95], [0.9, 0.99]]") == pairs
    assert values(resolutions="[32], [24, 32]") == {"resolutions": ([32], [24, 32])}
    with pytest.raises(JobError, match=r"betas = .*brackets: write --grid 'betas=\[V1,V2\],\["):
        values(betas="0.9,0.95")
    with pytest.raises(JobError, match=r"such as betas=0.9,0.95$"):  # its lists are in brackets
        values(betas="[0.9, 0.95], [0.9]")


def test_a_word_may_stand_before_a_list():
    assert values(resolutions="auto, [24,32]") == {"resolutions": ("auto", [24, 32])}
    assert values(resolutions=" [24,32],[32]") == {"resolutions": ([24, 32], [32])}
    six = [0.5, 0.5, 0.5, 0.2, 0.2, 0.2]
    assert values(normalize=f"data,{six}") == {"normalize": ("data", six)}
    assert values(frozen="stem.*,[ab].*") == {"frozen": (["stem.*"], ["[ab].*"])}  # patterns
    assert values(weights="a.pt,[b].pt") == {"weights": ("a.pt", "[b].pt")}


@pytest.mark.parametrize("key", ["resolutions", "betas", "frozen"])
def test_brackets_that_may_hold_one_list_or_several_values_are_refused(key):
    said = f"{key} = [0.5, 0.9] may be one list or 2 values: write '[[0.5, 0.9]]' for the list, or "
    with pytest.raises(JobError, match=re.escape(f"{said}0.5, 0.9 for the values")):
        values(**{key: "[0.5, 0.9]"})
    assert values(resolutions="[[24, 32]]") == {"resolutions": ([24, 32],)}
    assert values(resolutions="[24]") == {"resolutions": ([24],)}


def test_values_may_be_numpys():
    found = values(warmup_epochs=np.arange(3), learning_rate=[np.float32(0.25), np.int64(1)])
    assert found == {"warmup_epochs": (0.0, 1.0, 2.0), "learning_rate": (0.25, 1.0)}
    assert values(learning_rate="[0.1, 1e-3, auto]") == {"learning_rate": (0.1, 0.001, "auto")}


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({}, "a sweep needs something to vary"),
        ({"warmup": "1"}, "unknown job key 'warmup': write, for instance, warmup_epochs=5"),
        ({"ags": [{"mode": "gain"}]}, "unknown job key 'ags'"),
        ({"scaling": "sqrt,linear,sqrt"}, "the grid repeats scaling=sqrt"),
        ({"learning_rate": "0.1,1e-1"}, "the grid repeats learning_rate=0.1"),
        ({"learning_rate": [0.1, 0.1 + 1e-15]}, "the grid repeats learning_rate=0.1"),
        ({"learning_rate": ""}, "the grid has no values for learning_rate"),
        ({"learning_rate": []}, "the grid has no values for learning_rate"),
        ({"learning_rate": "0.1,-1"}, "job key learning_rate = '-1'"),
        ({"learning_rate": "0"}, "job key learning_rate = '0'"),
        ({"scaling": "log"}, "job key scaling = 'log'"),
        ({"epochs": [True]}, "this key is no yes or no"),
        ({"epochs": 3}, r"epochs = 3 is no list of values: write \[3\]"),
        ({"resolutions": "[32"}, "is no YAML list"),
        ({"resolutions": "[2024-13-45]"}, "is no YAML list"),
        ({"seed": "0,1"}, "seed cannot vary in a sweep: say how many seeds with --seeds"),
        ({"data": "digits"}, "data cannot vary in a sweep: accuracy is compared on the same"),
        ({"data_args": [{"split": "a"}]}, "data_args cannot vary in a sweep: accuracy is"),
        ({"port": "1,2"}, "port cannot vary"),
    ],
)
def test_a_bad_grid_is_refused_in_one_line(grid, said):
    with pytest.raises(JobError, match=said) as refusal:
        read_grid(JOB, grid)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["scaling"], "is no key with values"),
        (["=1"], "is no key with values"),
        (
            ["scaling=sqrt", "scaling=none"],
            "--grid scaling=none: scaling=sqrt is given as well; put all its values",
        ),
    ],
)
def test_a_grid_on_the_command_line_names_each_key_once(texts, said):
    with pytest.raises(JobError, match=said):
        words_of_grid(texts)


def test_seeds_follow_the_jobs_own_unless_they_are_named():
    assert seeds_of(Job(seed=5), 3) == (5, 6, 7)
    assert seeds_of(Job(seed=5), [2, 0]) == (2, 0)
    for seeds, said in (
        *((0, "needs one or more"), ([1, 1], "repeat one"), ([-1], "job key seed")),
        (10**12, "seeds=1,000,000,000,000: a sweep has 100,000 runs at most"),
        ([1, "1"], "seeds=1,1 repeat one"),
        ([1.5], "job key seed = 1.5"),
    ):
        with pytest.raises(JobError, match=said):
            seeds_of(Job(), seeds)
    with pytest.raises(ArgumentError, match=r"takes how many, .* not the bool True"):
        seeds_of(Job(), True)
    for seeds in (["2", 0.0], np.array([2, 0]), (np.int64(2), 0)):
        assert [(seed, type(seed)) for seed in seeds_of(Job(), seeds)] == [(2, int), (0, int)]


def test_a_grid_has_as_many_runs_as_anybody_could_wait_for():
    grid = {"scaling": "none,sqrt", "epochs": "2,3"}
    with pytest.raises(JobError, match="the grid has 120,000 runs with its seeds: give fewer"):
        cells_of(JOB, read_grid(JOB, grid), range(30_000))


def test_the_first_seed_of_all_settings_comes_first():
    cells = cells_of(JOB, read_grid(JOB, {"scaling": "none,sqrt", "epochs": "2,3"}), (0, 1))
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert [cell.values for cell in cells[:4]] == [
        *(("none", 2), ("none", 3), ("sqrt", 2), ("sqrt", 3)),
    ]
    assert cells[5].name == "scaling=none,epochs=3,seed=1"
    assert cells[5].job == Job(global_batch=64, scaling="none", epochs=3, seed=1)


def test_a_cell_has_the_same_name_in_a_wider_grid():
    keys = read_grid(JOB, {"scaling": "none", "epochs": "2"})
    wider = widened(keys, read_grid(JOB, {"epochs": "2,3"}))
    assert [one.values for one in wider] == [("none",), (2, 3)]
    rates = read_grid(JOB, {"learning_rate": [0.1]})
    assert widened(rates, read_grid(JOB, {"learning_rate": [0.1 + 1e-15]})) == rates
    few, many = (cells_of(JOB, some, (0,)) for some in (keys, wider))
    assert few[0] == many[0]
    with pytest.raises(JobError, match=r"over scaling, epochs: ags\.mode cannot join"):
        widened(keys, read_grid(JOB, {"ags.mode": "norm"}))


@pytest.mark.parametrize("letter", ["ü", "漢", "\N{MATHEMATICAL BOLD ITALIC SMALL A}"])
def test_a_long_name_fits_its_folder_and_the_file_that_its_plan_is_written_to(letter):
    networks = [f"a:{60 * letter}{end}" for end in "bc"] + [
        f"a:{200 * letter}{end}" for end in "bc"
    ]
    found = cells_of(JOB, read_grid(JOB, {"network": networks}), (0, 2**62))
    names = [cell.name for cell in found]
    assert len(set(names)) == len(names) == 8
    for name in names:
        assert len(f".{name}.json.01234567".encode()) <= 255
    (cell,) = cells_of(JOB, read_grid(JOB, {"network": [f"a:{20 * letter}"]}), (0,))
    assert cell.name.startswith(f"network=a_{20 * letter},")  # whole, as it has always been


odd = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=120)


@settings(max_examples=50)
@given(networks=st.lists(odd, min_size=2, max_size=4, unique_by=str.strip))
def test_names_are_folders_and_tell_cells_apart(networks):
    keys = read_grid(JOB, {"network": [f"a:{name}" for name in networks]}) if networks else ()
    names = [cell.name for cell in cells_of(JOB, keys, (0, 1))]
    assert len(set(names)) == 2 * len(keys[0].values)
    for name in names:
        assert len(name.encode()) < 250
        assert not set(name) & set("/\\:*\0 \n")
        assert name.partition(",")[0] not in (".", "..")
