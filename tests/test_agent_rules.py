"""What an agent carries out, by its rules, and which plan it follows."""

from __future__ import annotations

import pytest

from batchwright.records import Job, Plan, Stage
from batchwright.records.agent_rules import (
    DEFAULTS,
    Needs,
    Offer,
    lacking,
    not_allowed,
    other_choice,
    rules_of,
)
from batchwright.records.documents import change_job
from batchwright.records.plan_fields import TOLD, TOLD_OF_A_ROW
from batchwright.records.registries.networks import NETWORKS
from samples import make_plan


def job(**keys):
    return Job(**keys)


def test_without_rules_digits_and_our_own_networks_are_allowed():
    ours = {name for name, one in NETWORKS.items() if not one.takes_name}
    for network in ours:
        assert not not_allowed((), job(network=network))
    assert set(DEFAULTS["network"]) == ours


def test_arguments_are_carried_out_where_a_rule_names_them():
    asked = job(network="timm:resnet18", network_args={"pretrained": True})
    rules = ["network=timm:*"]
    assert not_allowed(rules, asked).startswith('network_args={"pretrained": true} is not allowed')
    assert not not_allowed([*rules, 'network_args={"pretrained": true}'], asked)
    assert not_allowed([], asked).startswith("network=timm:resnet18 is not allowed")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"data": "cifar10:/sets/c"}, "data=cifar10:/sets/c"),
        ({"network": "torchvision.models:resnet50"}, "network=torchvision.models:resnet50"),
        ({"loss": "os:system"}, "loss=os:system"),
        ({"weights": "/etc/passwd"}, "weights=/etc/passwd"),
    ],
)
def test_what_no_rule_names_is_refused_by_name(keys, named):
    assert not_allowed((), job(**keys)).startswith(f"{named} is not allowed")


def test_a_rule_for_one_key_leaves_the_others_as_they_are():
    rules = ("data=imagefolder:/sets/*",)
    assert not not_allowed(rules, job(data="imagefolder:/sets/a/b"))
    assert "data=digits" in not_allowed(rules, job())
    assert "network=" in not_allowed(rules, job(data="imagefolder:/sets/a", network="a:b"))
    assert not not_allowed((*rules, "data=digits"), job())


@pytest.mark.parametrize(
    "data",
    [
        "imagefolder:/sets/../etc",
        "imagefolder:/sets/a/..",
        "imagefolder:/sets/..\\etc",
        "imagefolder:/Sets/a",
        "cifar10:/sets/a",
        "imagefolder:/sets",
    ],
)
def test_a_pattern_does_not_lead_out_of_its_folder(data):
    assert not_allowed(("data=imagefolder:/sets/*",), job(data=data))


@pytest.mark.parametrize(
    "path",
    ["/sets/{a,..}/x.tar", "/sets/{a,.}{b,.}/x.tar", "/sets/.{,a}./x", "/sets/{{.,a}.,b}/x",
     "/sets/{a/.,b}./x", "/sets/.."],
)  # fmt: skip
def test_braces_and_arguments_do_not_lead_out_of_the_folder_either(path):
    assert not_allowed(("data=wds:/sets/*",), job(data=f"wds:{path}"))
    rules = ("data=wds:/sets/*", 'data_args={"val": "/sets/*"}')
    asked = job(data="wds:/sets/{train,val}-{000..007}.tar", data_args={"val": path})
    assert not_allowed(rules, asked)
    fine = asked.model_copy(update={"data_args": {"val": "/sets/a.b/{c,d}.tar"}})
    assert not not_allowed(rules, fine)


@pytest.mark.parametrize(("depth", "allowed"), [(3, True), (30, False), (20_000, False)])
def test_braces_in_braces_take_no_time(depth, allowed):
    asked = job(data="wds:/sets/" + depth * "{" + depth * "}")
    assert not_allowed(("data=wds:/sets/*",), asked).startswith("data=") != allowed


def test_a_name_that_is_given_in_full_is_taken_as_it_is():
    assert not not_allowed(("data=imagefolder:../a[1]",), job(data="imagefolder:../a[1]"))


@pytest.mark.parametrize("text", ["digits", "data=", "=a", "epochs=3", ""])
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match="KEY=PATTERN"):
        rules_of([text])


def test_more_workers_than_a_machine_can_have_wait_for_another_one():
    """The agent would measure nothing, and the job would have failed."""
    needs = Needs(workers=24)
    assert lacking(Offer(cores=2), needs) == ("24 workers", "16")
    assert lacking(Offer(cores=3), needs) is None
    assert lacking(Offer(cores=3, max_workers=4), needs) == ("24 workers", "4")
    assert lacking(Offer(), needs) is None  # an agent that does not say


# ----------------------------------------------------------------------------------- plans compared

APPROVED = {
    *("format", "job", "data", "network", "method", "merge", "server", "update", "ags"),
    *("average_epochs", "judged_from", "precision", "learning_rate", "stages", "growth"),
    *("max_epochs", "kinds"),
}
APPROVED_OF_A_ROW = {
    *("epochs", "resolution", "learning_rate", "dropout", "augmentation", "rate_stage"),
    *("augmentation_strength", "samples_per_round", "update_factors", "local_batch_sizes"),
    "micro_batch_size",
}


def test_each_field_of_a_plan_is_either_what_was_approved_or_merely_told():
    """A new field belongs into one of the two: plans are approved by one version and followed by
    another.
    """
    for record, approved, told in (
        (Plan, APPROVED, TOLD),
        (Stage, APPROVED_OF_A_ROW, TOLD_OF_A_ROW),
    ):
        assert approved | {*told} == {*record.model_fields}
        assert not approved & {*told}


def test_plans_that_train_alike_are_one_choice_whatever_they_tell():
    plan = make_plan()
    told = {name: Plan.model_fields[name].default for name in TOLD}
    rows = {name: Stage.model_fields[name].default for name in TOLD_OF_A_ROW}
    earlier = plan.model_copy(
        update={
            **told,
            "job": change_job(plan.job, {"goal.max_workers": 8}),
            "stages": tuple(one.model_copy(update=rows) for one in plan.stages),
        }
    )
    assert earlier != plan
    assert other_choice(plan, earlier) == other_choice(earlier, plan) == ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"update": "adamw"}, "update = 'adamw' instead of 'sgd'"),
        ({"workers": 3}, "stages[0].local_batch_sizes[2] = 48 instead of nothing"),
        ({"local_batch_sizes": (47, 49)}, "stages[0].local_batch_sizes[0] = 47 instead of 48"),
        ({"goal.deadline": 60}, "job.goal.deadline = 60.0 instead of None"),
        ({"goal.memory": 2**30}, "job.goal.memory = 1073741824 instead of None"),
        ({"goal.accuracy": 0.5}, "job.goal.accuracy = 0.5 instead of None"),
    ],
    ids=str,
)
def test_what_was_approved_is_compared(change, line):
    plan = make_plan()
    ((name, value),) = change.items()
    (row,) = plan.stages
    if name.startswith("goal."):
        other = plan.model_copy(update={"job": change_job(plan.job, change)})
    elif name == "update":
        other = plan.model_copy(update=change)
    else:
        sizes = (48,) * value if name == "workers" else value
        rows = (row.model_copy(update={"local_batch_sizes": sizes}),)
        other = plan.model_copy(update={"stages": rows})
    assert other_choice(plan, other) == line


def test_an_argument_that_is_none_is_another_than_one_that_is_missing():
    """A function of the job's own may have another default."""
    plan = make_plan()
    other = plan.model_copy(update={"job": change_job(plan.job, {"network_args.width": None})})
    assert other.job.network_args == {"width": None}
    assert other_choice(plan, other) == "job.network_args.width = None instead of nothing"
    assert other_choice(other, plan) == "job.network_args.width = nothing instead of None"
