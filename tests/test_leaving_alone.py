"""One of two workers ends its loop, or fails in it, while the other goes on: both are told."""

from __future__ import annotations

import gc
import os
import re
import signal
from contextlib import suppress

import pytest
import torch
from torch.nn import functional

from batchwright.errors import BatchwrightError
from test_session import Points, make_session, make_tiny_plan


def leaves_within_an_epoch(alone, one):
    for _ in one.epochs():
        for number, batch in enumerate(one.batches()):
            take(one, batch)
            if alone and number == 1:
                return


def leaves_between_epochs(alone, one):
    """Such as for a loss of its own."""
    for _ in one.epochs():
        for batch in one.batches():
            take(one, batch)
        if alone:
            break


def catches_an_error_of_an_evaluation(alone, one):
    def metric(outputs, labels):
        if alone:
            raise ValueError("of my own")
        return labels == 0

    for _ in one.epochs():
        for batch in one.batches():
            take(one, batch)
        with suppress(ValueError):
            one.evaluate(Points(8), metric)


def leaves_for_an_error_of_a_step(alone, one):
    for _ in one.epochs():
        for features, labels in one.batches():
            try:
                reduction = "none" if alone else "mean"
                one.step(functional.cross_entropy(one.model(features), labels, reduction=reduction))
            except ValueError:
                return


def evaluates_alone(alone, one):
    """As where worker 0 alone does so."""
    for _ in one.epochs():
        for batch in one.batches():
            take(one, batch)
        if alone:
            one.evaluate(Points(8), right)


def evaluates_alone_between_steps(alone, one):
    for _ in one.epochs():
        for number, batch in enumerate(one.batches()):
            take(one, batch)
            if alone and number == 1:
                one.evaluate(Points(8), right)


def right(outputs, labels):
    return outputs.argmax(dim=1) == labels


def take(one, batch):
    one.step(functional.cross_entropy(one.model(batch[0]), batch[1]))


LOST = r"LostWorkerError: lost contact with another worker during an exchange: worker 1 \(.*\) "
CAUGHT = r"RuntimeError: session\.%s\(\) has ended with an error \(ValueError: "
ALONE = r"worker 1 \(.*\) %s, and worker 0 \(.*\) %s: call session\.step\(\) and session\.evalua"
LOOPS = {
    leaves_within_an_epoch: ALONE % ("has left the loop", "takes a step"),
    leaves_between_epochs: ALONE % ("has left the loop", "ends an epoch"),
    evaluates_alone: ALONE % ("evaluates", "ends an epoch"),
    evaluates_alone_between_steps: ALONE % ("evaluates", "takes a step"),
    catches_an_error_of_an_evaluation: CAUGHT % "evaluate",
    leaves_for_an_error_of_a_step: CAUGHT % "step",
}


def both(rank):
    gc.disable()  # what a session leaves is there still when a process is forked
    try:
        return [(end(rank == 1, loop), exit_code_of_a_fork()) for loop in LOOPS]
    finally:
        gc.enable()


def exit_code_of_a_fork():
    """Of a process that is forked here, as loader processes are, and collects what is left."""
    pid = os.fork()
    if not pid:
        signal.alarm(250)  # it may wait for a thread that it does not have
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def end(alone, loop):
    torch.manual_seed(0)
    try:
        with make_session(plan=make_tiny_plan((5, 5), epochs=3)) as one:
            loop(alone, one)
    except (RuntimeError, BatchwrightError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was told"


@pytest.mark.slow
def test_a_worker_that_goes_its_own_way_is_told_and_the_other_names_it(crew):
    first, second = crew.together(both, workers=2)
    assert {code for _, code in first + second} == {0}
    for (loop, said), (named, _), (told, _) in zip(LOOPS.items(), first, second, strict=True):
        assert re.match(f"(TrainingError: )?{said}", told), (loop, told)
        assert re.match(f"{LOST}left the run: {said}", named), (loop, named)
