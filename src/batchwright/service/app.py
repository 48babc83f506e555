"""The app, from its store: a thin shell over the functions that the command line calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from batchwright.errors import BatchwrightError
from batchwright.records.service import Problem
from batchwright.service.adviser import Adviser
from batchwright.service.api import jobs, operation, plans, records, runs
from batchwright.service.api.error_responses import answer, problem_of
from batchwright.service.middleware.bodies import Bodies
from batchwright.service.middleware.headers import SecurityHeaders
from batchwright.service.middleware.hosts import Hosts
from batchwright.service.middleware.identify import Identify
from batchwright.service.middleware.observe import Observe
from batchwright.service.operating.meters import Meters
from batchwright.service.operating.remover import Remover
from batchwright.service.pages.problem import error_page
from batchwright.service.pages.routers import ROUTERS as PAGES
from batchwright.service.settings import Settings
from batchwright.service.store import Store

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
)

TIDY_SECONDS = 3600.0
"""Between two looks for what is too old to be kept."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "It cannot be read."},
    401: {"model": Problem, "description": "A token is needed, or it is unknown."},
    403: {"model": Problem, "description": "The token may not do this."},
    404: {"model": Problem, "description": "There is no such thing."},
    409: {"model": Problem, "description": "It does not fit what is stored."},
    413: {"model": Problem, "description": "The body is too large."},
    422: {"model": Problem, "description": "A value is wrong; the line says which."},
    429: {"model": Problem, "description": "Too many requests: come again after `retry_after`."},
    503: {"model": Problem, "description": "The database does not answer just now."},
}


def create_app(store: Store, settings: Settings) -> FastAPI:
    """The service over ``store``, which the caller closes."""
    meters = Meters()
    app = FastAPI(
        title="Batchwright",
        version=version("batchwright"),
        summary="Plans for image trainings, runs that report, jobs that agents carry out.",
        openapi_url=None,  # served by api.health, to those who may read
        docs_url=None,  # would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEMS,
        lifespan=_lifespan,
        middleware=[  # the first one is the outermost
            Middleware(SecurityHeaders),
            Middleware(Observe, meters=meters),
            Middleware(Hosts, names=(settings.host, *settings.allowed_hosts)),
            Middleware(Identify, store=store, limits=settings.limits),
            Middleware(Bodies, limits=settings.limits),
        ],
    )
    app.state.store = store
    app.state.settings = settings
    app.state.meters = meters
    app.state.adviser = Adviser(store)
    app.state.remover = Remover(store)
    for router in API:
        app.include_router(router)
    for router in PAGES:
        app.include_router(router, include_in_schema=False)
    app.state.error_page = error_page
    for kind in (BatchwrightError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _tell)
    return app


def _tell(request: Request, error: Exception) -> Response:
    response = answer(request, problem_of(error))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    await run_in_threadpool(app.state.store.jobs.forgive_absence)
    tidying = asyncio.create_task(_tidy_now_and_then(app.state.store, app.state.remover))
    yield
    tidying.cancel()
    await run_in_threadpool(app.state.remover.close)
    await run_in_threadpool(app.state.adviser.close)


async def _tidy_now_and_then(store: Store, remover: Remover) -> None:
    """Forget what is too old, at the start and then every hour."""
    while True:
        try:
            for run in await run_in_threadpool(store.tidy):
                log.info("deleted", extra={"fields": {"run": run}})
            remover.soon()  # also what was begun when the service ended
        except Exception as error:
            log.error("tidying failed", exc_info=error)
        await asyncio.sleep(TIDY_SECONDS)
