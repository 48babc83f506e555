"""What a shell completes: verbs, options, job keys and their values."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from batchwright.cli.commands import app

RUNNER = CliRunner()


def fish(line):
    """What the command answers for a line, as fish asks: the line so far."""
    environment = {"_BATCHWRIGHT_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": line}
    environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    return answered(environment)


def bash(line):
    """As bash asks, which takes an = for a word of its own."""
    words = line.replace("=", " = ").split(" ")
    environment = {"_BATCHWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
    return answered(environment | {"COMP_CWORD": str(len([one for one in words if one]) - 1)})


def answered(environment):
    done = RUNNER.invoke(app, env=environment, prog_name="batchwright")
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return [line.partition("\t")[0] for line in done.output.splitlines() if line]


@pytest.mark.parametrize("ask", [pytest.param(fish, marks=pytest.mark.slow), bash])
def test_verbs_options_and_keys_are_completed(ask):
    assert ask("batchwright sch") == ["schedule"]
    assert "--explain" in ask("batchwright run --e")
    assert ask("batchwright run epochs=3 probe.") == [
        *("probe.budget=", "probe.error=", "probe.steps=", "probe.learning=", "probe.kind="),
    ]
    assert ask("batchwright plan profile.json goal.obj")[:2] == [
        "goal.objective=",
        "goal.objective=auto",
    ]
    assert ask("batchwright submit --server x method=dual")[-1].endswith("dual-batch")
    assert ask("batchwright keys goal.dead") == ["goal.deadline"]
    assert ask("batchwright run --tracker ten") == ["tensorboard"]
    assert ask("batchwright export plan.json --as sb") == ["sbatch"]


def test_values_of_a_key_are_completed_as_the_shell_takes_the_word_apart():
    assert fish("batchwright run optimizer=m") == ["optimizer=muon"]
    assert bash("batchwright run optimizer=m") == ["muon"]
    assert {"auto", "sgd", "adamw", "muon"} <= set(bash("batchwright run optimizer="))
    assert {"data=digits", "data=cifar100:"} <= set(fish("batchwright run data="))
    assert fish("batchwright run epoch") == ["epochs=", "epochs=30"]  # so that the word stays open


@pytest.mark.parametrize(
    "line", ["batchwright report ru", "batchwright plan ", "batchwright nothing x"]
)
def test_where_files_belong_the_shell_offers_its_own(line):
    assert fish(line) == []
    assert fish("batchwright run nothing=") == []
