"""All pages, in the order in which addresses are looked up."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from batchwright.service.pages import assets, compare, demo, jobs, run, runs, sign_in
from batchwright.service.pages.planning import planner

ROUTERS: Sequence[APIRouter] = (
    assets.router,
    sign_in.router,
    runs.router,  # its /runs/rows comes before /runs/{run}
    run.router,
    compare.router,
    planner.router,
    jobs.router,
    demo.router,
)
