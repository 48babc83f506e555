"""The OpenAPI description with an example beside each body, answer and parameter.

Documents are those of the demo run, shortened; of all else the schema says what it may be.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from batchwright.records.service import RecordBatch
from batchwright.service.pages.demo import demo

ID = "5f0c2d1e-8a44-4a0b-9d0e-2f6f7c1f0a11"

_VALUES: dict[str, Any] = {
    **dict.fromkeys(("created", "changed", "seen"), 1790000000.0),  # Unix time in seconds
    "allow": "data=digits",
    "data": "digits",
    "detail": f"there is no run {ID}",
    "job": {"data": "digits", "network": "resnet8", "epochs": 4},
    "keys": {"goal.objective": "knee", "epochs": 4},
    "kind": "step",
    "method": "plain",
    "network": "resnet8",
    "reason": "epochs take 1.4 s, not the predicted 1.0 s",
}
"""By name of the field or parameter; any other gets the simplest value that its schema allows."""


def described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of an app, made once."""
    description: dict[str, Any] | None = getattr(app.state, "description", None)
    if description is None:
        description = app.openapi()
        template = "#/components/schemas/{model}"
        batch = RecordBatch.model_json_schema(ref_template=template)
        description["components"]["schemas"] |= batch.pop("$defs") | {"RecordBatch": batch}
        run = demo()
        plan, profile = run["introduction"]["plan"], run["introduction"]["profile"]
        plan |= {"considered": [], "knees": [], "held_out": [], "reasons": plan["reasons"][:1]}
        summary = run["end"]["summary"]
        summary |= {"plan": plan, "epochs": summary["epochs"][:1]}
        documents = {"Plan": plan, "Profile": profile, "RunSummary": summary}
        known = description["components"]["schemas"] | {
            name: {"const": document} for name, document in documents.items()
        }
        for path in description["paths"].values():
            for operation in path.values():
                for body in (operation.get("requestBody", {}), *operation["responses"].values()):
                    for content in body.get("content", {}).values():
                        content["example"] = example_of(content.get("schema", {}), known)
                for parameter in operation.get("parameters", ()):
                    name, schema = parameter["name"], parameter["schema"]
                    parameter["example"] = example_of(schema, known, name)
        app.state.description = description  # only once complete: other threads may read it
    return description


def example_of(schema: dict[str, Any], known: dict[str, Any], name: str = "") -> Any:
    """A value that a schema allows.

    Args:
        schema: The JSON schema.
        known: By name, the schemas that others refer to.
        name: Name of the field or parameter.
    """
    if "$ref" in schema:
        return example_of(known[schema["$ref"].rpartition("/")[2]], known, name)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            none = name in ("error", "waiting")
            return None if none else example_of(schema[several][0], known, name)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if schema.get("default") is not None:
        return schema["default"]
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: example_of(part, known, key) for key, part in schema["properties"].items()}
        case "object":
            return _VALUES.get(name, {})
        case "array":
            return [example_of(schema["items"], known, name)]
        case "boolean":
            return False
        case "integer":
            return int(schema.get("minimum", 0))
        case "number":
            return _VALUES.get(name, 1.0)
    if "[0-9a-f]" in schema.get("pattern", ""):
        return 64 * "0" if "{64}" in schema["pattern"] else ID
    return _VALUES.get(name, "gpu-box")
