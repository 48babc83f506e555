"""The OpenAPI description with an example beside each body, answer and parameter."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from batchwright.service.api.examples import JOB, PROFILE, RUN, examples

_PARAMETERS: dict[str, Any] = {
    "run": RUN,
    "job": JOB,
    "profile": PROFILE,
    "agent": "gpu-box",
    "number": 1,
    "before": RUN,
    "state": None,  # of runs or of jobs: the first that is allowed
    "query": "digits",
    "kind": "step",
    "most": 1000,
    "after": -1,
    "limit": 50,
}


def described(app: FastAPI) -> dict[str, Any]:
    """The description; made once for each app."""
    made: dict[str, Any] | None = getattr(app.state, "description", None)
    if made is None:
        made = app.openapi()
        known = examples()
        for path in made["paths"].values():
            for operation in path.values():
                _add(operation, known)
        app.state.description = made
    return made


def _add(operation: dict[str, Any], known: dict[str, Any]) -> None:
    bodies = [operation.get("requestBody", {}), *operation.get("responses", {}).values()]
    for body in bodies:
        for content in body.get("content", {}).values():
            example = _example_of(content.get("schema", {}), known)
            if example is not None:
                content["example"] = example
    for parameter in operation.get("parameters", ()):
        example = _PARAMETERS.get(parameter["name"])
        parameter["example"] = _first_choice(parameter["schema"]) if example is None else example


def _example_of(schema: dict[str, Any], known: dict[str, Any]) -> Any:
    """Of a named record or a list of them; `None` of anything else."""
    if schema.get("type") == "array":
        item = _example_of(schema.get("items", {}), known)
        return None if item is None else [item]
    for choice in (schema, *schema.get("anyOf", ())):
        name = choice.get("$ref", "").rpartition("/")[2]
        name = name.removesuffix("-Input").removesuffix("-Output")
        if name in known:
            return known[name]
    return None


def _first_choice(schema: dict[str, Any]) -> Any:
    """The first value that a parameter allows."""
    for choice in (schema, *schema.get("anyOf", ())):
        if choice.get("enum"):
            return choice["enum"][0]
    return None
