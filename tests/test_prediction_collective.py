"""`prediction.collective`: exchange times measured, between and beyond."""

import pytest

from batchwright.errors import PlanError
from batchwright.prediction.collective import exchange_seconds, fit_collectives
from batchwright.records import CollectiveTime, Link

LINK = Link(latency=1e-4, bandwidth=1e9)
SIZES = (40_000, 4_000_000, 44_000_000)


def timed(size, seconds, workers=2, operation="all-reduce", scatter=0.0):
    return CollectiveTime(
        operation=operation,
        bytes=size,
        workers=workers,
        seconds=seconds,
        low=seconds * (1 - scatter),
        high=seconds * (1 + scatter),
        repeats=20,
    )


MEASURED = [timed(s, t) for s, t in zip(SIZES, (0.0026, 0.0033, 0.028), strict=True)]


def test_measured_times_are_interpolated_and_limited_by_latency_and_bandwidth():
    model = fit_collectives(MEASURED)
    assert model.seconds(4, 2) == 0.0026
    assert model.seconds(40_000, 2) == 0.0026
    assert model.seconds(4_000_000, 2) == pytest.approx(0.0033)
    assert model.seconds(24_000_000, 2) == pytest.approx((0.0033 + 0.028) / 2)
    assert model.seconds(44_000_000, 2) == pytest.approx(0.028)
    assert model.seconds(88_000_000, 2) == pytest.approx(0.056)


def test_one_worker_exchanges_nothing():
    assert fit_collectives([]).seconds(10**9, 1) == 0
    assert not fit_collectives([]).assumed(1)


def test_between_measured_workers_it_is_linear_and_below_them_as_the_fewest():
    model = fit_collectives([timed(1000, 0.002, 4), timed(1000, 0.006, 8)])
    assert model.seconds(1000, 6) == pytest.approx(0.004)
    assert model.seconds(1000, 2) == pytest.approx(0.002)


def test_more_workers_than_measured_are_told_apart_and_refused_without_a_link():
    model = fit_collectives(MEASURED)
    assert not model.assumed(2)
    assert model.assumed(4)
    with pytest.raises(PlanError, match="workers=4"):
        model.seconds(8_000_000, 4)


def test_a_stated_link_takes_a_ring_or_one_process_through_which_all_go():
    ring, server = (
        exchange_seconds(8_000_000, 4, LINK, way) for way in ("all-reduce", "push-pull")
    )
    assert ring == pytest.approx(6 * (1e-4 + 2e6 / 1e9))
    assert server == pytest.approx(2 * (1e-4 + 3 * 8e6 / 1e9))


@pytest.mark.parametrize(
    ("link", "missing"),
    [
        (None, "link.latency=... and link.bandwidth=..."),
        (Link(latency=1e-4), "link.bandwidth=..."),
        (Link(bandwidth=1e9), "link.latency=..."),
    ],
)
def test_without_a_link_the_message_says_which_keys_to_give(link, missing):
    with pytest.raises(PlanError) as error:
        exchange_seconds(1000, 16, link)
    assert missing in str(error.value)
    assert "workers=16" in str(error.value)
    assert "\n" not in str(error.value)
