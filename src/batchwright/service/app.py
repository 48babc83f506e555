"""The ASGI application of the service: a thin shell over the functions of the command line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from anyio import CapacityLimiter
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from batchwright.errors import BatchwrightError
from batchwright.records.service import Problem
from batchwright.service.adviser import Adviser
from batchwright.service.api import artifacts, jobs, operation, plans, records, runs
from batchwright.service.api.error_responses import answer, problem_of
from batchwright.service.background_queue import Remover
from batchwright.service.middleware.bodies import Bodies
from batchwright.service.middleware.hosts import Hosts, SecurityHeaders
from batchwright.service.middleware.identify import Identify
from batchwright.service.middleware.observe import Meters, Observe
from batchwright.service.middleware.unread import Unread
from batchwright.service.operating.figures import StoreFigures
from batchwright.service.pages import (
    assets,
    compare,
    demo,
    planner,
    run_page,
    sign_in,
)
from batchwright.service.pages import jobs as jobs_page
from batchwright.service.pages import runs as runs_page
from batchwright.service.pages.rendering import error_page
from batchwright.service.problems import DESCRIPTIONS
from batchwright.service.settings import Settings
from batchwright.service.store import Store
from batchwright.service.store.tokens import USED_SECONDS
from batchwright.service.webhook import Webhook
from batchwright.storage.version import VERSION

log = logging.getLogger("batchwright.service")

API: Sequence[APIRouter] = (
    operation.router,
    runs.router,
    records.router,
    plans.profiles_router,
    plans.router,
    runs.advice_router,
    jobs.router,
    jobs.agents_router,
    artifacts.router,
)

PAGES: Sequence[APIRouter] = (  # in the order in which paths are looked up
    assets.router,
    sign_in.router,
    runs_page.router,  # its /runs/rows comes before /runs/{run}
    run_page.router,
    compare.router,
    planner.router,
    jobs_page.router,
    demo.router,
)

TIDY_SECONDS = 3600.0
"""Between two deletions of what is too old to be kept."""

TICK_SECONDS = 1.0
"""Between two looks for silent agents, at most."""


def create_app(store: Store, settings: Settings) -> FastAPI:
    """The application over ``store``, which the caller closes."""
    meters = Meters()
    meters.registry.register(StoreFigures(store))
    store.database.meter = meters.note_write
    app = FastAPI(
        title="Batchwright",
        version=VERSION,
        summary="Plans for image trainings, runs that report, jobs that agents carry out.",
        openapi_url=None,  # served by api.operation, to those who may read
        docs_url=None,  # would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={
            status: {"model": Problem, "description": words}
            for status, words in DESCRIPTIONS.items()
        },
        lifespan=_lifespan,
        middleware=[  # the first one is the outermost
            Middleware(SecurityHeaders),
            Middleware(Unread),
            Middleware(Observe, meters=meters),
            Middleware(Hosts, names=(settings.host, *settings.allowed_hosts)),
            Middleware(Identify, store=store, settings=settings),
            Middleware(Bodies, limits=settings.limits),
        ],
    )
    app.state.store = store
    app.state.settings = settings
    app.state.meters = meters
    app.state.adviser = Adviser(store)
    app.state.remover = Remover(store)
    app.state.webhook = Webhook(store)
    app.state.readers = CapacityLimiter(records.READERS)
    app.state.transfers = artifacts.Transfers(settings.limits.transfers)
    for router in API:
        app.include_router(router)
    for router in PAGES:
        app.include_router(router, include_in_schema=False)
    app.state.error_page = error_page
    app.state.draw_run = run_page.run_pages(store)
    app.state.plan_answers = planner.Answers()
    for kind in (BatchwrightError, RequestValidationError, ValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    return app


def _answer_error(request: Request, error: Exception) -> Response:
    response = answer(request, problem_of(error))
    # The traceback's frames hold the body, and the exception itself: a reference cycle, which would
    # stay in memory until Python collects cycles.
    error.__traceback__ = None
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    store: Store = app.state.store
    tasks = (
        asyncio.create_task(_tidy(store, app.state.remover)),
        asyncio.create_task(_note_used_tokens(store)),
        asyncio.create_task(_watch_leases(store)),
    )
    app.state.webhook.start()
    yield
    await run_in_threadpool(app.state.webhook.close)
    for task in tasks:
        task.cancel()
    with suppress(SQLAlchemyError):
        await run_in_threadpool(store.tokens.note_used)
    await run_in_threadpool(app.state.remover.close)
    await run_in_threadpool(app.state.adviser.close)


async def _watch_leases(store: Store) -> None:
    """Call `Store.tick` again and again."""
    failing = False
    while True:
        try:
            await run_in_threadpool(store.tick)
            failing = False
        except Exception as error:
            if not failing:  # a database that is away is logged once
                log.error("agents cannot be heard", exc_info=error)
            failing = True
        await asyncio.sleep(min(TICK_SECONDS, store.settings.lease_seconds / 20))


async def _note_used_tokens(store: Store) -> None:
    """Write now and then when tokens were used; what fails is written the next time."""
    while True:
        await asyncio.sleep(USED_SECONDS)
        with suppress(SQLAlchemyError):
            await run_in_threadpool(store.tokens.note_used)


async def _tidy(store: Store, remover: Remover) -> None:
    """Delete what is too old, at the start and then every hour."""
    while True:
        try:
            for run in await run_in_threadpool(store.tidy):
                log.info("deleted", extra={"fields": {"run": run}})
            remover.soon()  # also what the service was removing when it ended
        except Exception as error:
            log.error("tidying failed", exc_info=error)
        await asyncio.sleep(TIDY_SECONDS)
