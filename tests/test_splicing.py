"""One plan up to an epoch, another from there on."""

from __future__ import annotations

import pytest

from batchwright.algorithms.splicing import spliced, why_not
from batchwright.errors import PlanError
from batchwright.planning.schedule import rate_schedule
from batchwright.records import KindCount
from samples import EPOCHS, make_cyclic_plan, make_data, make_plan, make_summary


def other(epochs=EPOCHS, batch=64, **changes):
    stage = (
        make_plan()
        .stages[0]
        .model_copy(
            update={
                "epochs": epochs,
                "local_batch_sizes": (batch, batch),
                "micro_batch_size": batch,
                "learning_rate": 0.1,
            }
        )
    )
    return make_plan(stages=(stage,), considered=(), **changes)


def rows(plan):
    return [(stage.epochs, stage.global_batch_size, stage.learning_rate) for stage in plan.stages]


def test_rows_before_the_epoch_stay_and_those_from_it_are_the_new_ones():
    plan = spliced(make_plan(), other(), 7)
    assert rows(plan) == [(7, 96, 0.0866), (23, 128, 0.1)]
    assert plan.epochs == EPOCHS
    assert plan.learning_rate == make_plan().learning_rate
    assert plan.considered == ()


def test_a_plan_may_be_changed_again_and_a_change_taken_later_than_it_was_meant():
    once = spliced(make_plan(), other(), 7)
    assert rows(spliced(once, other(batch=16), 9)) == [
        *((7, 96, 0.0866), (2, 128, 0.1)),
        (21, 32, 0.1),
    ]
    assert rows(spliced(make_plan(), once, 10)) == [(10, 96, 0.0866), (20, 128, 0.1)]
    assert rows(spliced(make_plan(), once, 3)) == [
        *((3, 96, 0.0866), (4, 96, 0.0866)),
        (23, 128, 0.1),
    ]
    assert rows(spliced(once, once, 7)) == rows(once)


@pytest.mark.parametrize("epoch", [0, 1, 5, 6, 11])
def test_plans_of_many_rows_are_cut_where_the_epoch_is(epoch):
    plan = make_cyclic_plan()
    again = spliced(plan, plan, epoch)
    assert again.epochs == plan.epochs
    for number in range(plan.epochs):
        one, two = (p.stages[p.stage_of(number)] for p in (plan, again))
        assert one.model_copy(update={"epochs": 1}) == two.model_copy(update={"epochs": 1})


@pytest.mark.parametrize("epoch", [-1, EPOCHS])
def test_an_epoch_that_is_none_is_refused(epoch):
    with pytest.raises(PlanError, match=f"at epoch {epoch}"):
        spliced(make_plan(), other(), epoch)


def test_plans_that_do_not_go_together_are_refused():
    for new, named in (
        (other(data=make_data(digest="00" * 32)), "data"),
        (other(epochs=3), "epochs 3"),
        (make_cyclic_plan(), "method cyclic"),
    ):
        with pytest.raises(PlanError, match=named):
            spliced(make_plan(), new, 2)


def test_kinds_and_cores_are_those_of_the_workers_of_the_first_row():
    """An engine is asked for that row's workers, each with these cores."""
    kind = KindCount(kind="a100", count=2)
    before = make_plan(threads=2, cores=None, kinds=(kind,))
    after = other(threads=8, cores=4, kinds=(kind,))
    for epoch in (0, 7):
        plan = spliced(before, after, epoch)
        assert (plan.threads, plan.cores, plan.kinds) == (8, 4, (kind,))
        assert plan.worker_cores == 4
        assert why_not(plan, before, epoch) == ("" if epoch else why_not(after, before, 0))
    row = after.stages[0].model_copy(update={"local_batch_sizes": (64,)})
    alone = KindCount(kind="a100", count=1)
    fewer = after.model_copy(update={"stages": (row,), "kinds": (alone,)})
    plan = spliced(before, fewer, 7, workers_may_differ=True)
    assert (plan.workers, plan.threads, plan.cores, plan.kinds) == (2, 2, None, (kind,))
    assert why_not(plan, before, 7) == ""  # the run goes on from its checkpoint
    plan = spliced(before, fewer, 0, workers_may_differ=True)
    assert (plan.workers, plan.threads, plan.cores, plan.kinds) == (1, 8, 4, (alone,))


def test_a_spliced_plan_is_explained_as_any_other():
    plan = spliced(make_plan(), other(), 7)
    assert "23 (to 30)" in plan.explain()
    assert len(rate_schedule(plan).rows) == 2


@pytest.mark.slow
def test_a_plan_for_other_workers_later_on_is_reported_as_any_other(tmp_path):
    from batchwright.reporting.pages.page import write_page
    from batchwright.reporting.render.figures import write_figures

    last = make_summary(plan=spliced(make_plan(), other(), 7)).epochs[-1]
    alone = last.model_copy(update={"epoch": last.epoch + 1, "workers": last.workers[:1]})
    row = other().stages[0].model_copy(update={"local_batch_sizes": (64,)})
    fewer = spliced(
        make_plan(), make_plan(stages=(row,), considered=()), 7, workers_may_differ=True
    )
    with pytest.raises(PlanError, match="with workers 1, since it has workers 2"):
        spliced(make_plan(), fewer.model_copy(update={"stages": (row,)}), 7)
    summary = make_summary(plan=fewer, epochs=(*make_summary().epochs, alone))
    write_figures(summary, tmp_path / "figures")
    write_page(summary, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
