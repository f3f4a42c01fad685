"""All operations of a server, and their description in OpenAPI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bertsmith.base import VERSION
from bertsmith.serving.application import Application, Operation, Request
from bertsmith.serving.browser import page_operations
from bertsmith.serving.compatible import COMPATIBLE
from bertsmith.serving.models import ServedModel
from bertsmith.serving.routes import OPEN, OPERATIONS
from bertsmith.serving.settings import ServingSettings

REFUSALS = {
    "400": "no JSON",
    "401": "no valid key",
    "404": "a model that is not here, or cannot do it",
    "408": "the body did not arrive in time",
    "413": "too large",
    "415": "a body that is no JSON",
    "422": "a field that cannot be, which is named",
    "424": "a model of another kind",
    "429": "too many wait: try again after Retry-After seconds",
    "500": "a fault of the server",
    "504": "no answer in time",
}


class Error(msgspec.Struct):
    """The reason for which a request was refused."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: int


class Errors(msgspec.Struct):
    error: Error


def operations_of(models: dict[str, ServedModel], settings: ServingSettings) -> list[Operation]:
    """The operations of these models, with the public pages."""
    methods = {method for model in models.values() for method in model.methods}
    known = (*OPEN, *OPERATIONS, *COMPATIBLE)
    found = [own for own in known if not own.needs or methods & set(own.needs)]
    document = described(found)

    async def openapi(app: Application, request: Request, body: None) -> Any:
        return document

    found.append(Operation("/openapi.json", openapi, summary="This description", is_open=True))
    return [*found, *page_operations(models.values())]


def described(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document of operations."""
    kinds = [kind for own in operations for kind in (own.body, own.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*kinds, Errors], ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip([*kinds, Errors], schemas, strict=True))
    paths: dict[str, Any] = {}
    for own in operations:
        answer = {"schema": by_kind[own.answer]} if own.answer else {}
        told: dict[str, Any] = {
            "summary": own.summary,
            "operationId": f"{own.method.lower()}{own.path.replace('/', '_')}",
            "responses": {
                "200": {
                    "description": own.summary or "the answer",
                    **({"content": {"application/json": answer}} if own.answer else {}),
                }
            },
        }
        if own.body is not None:
            told["requestBody"] = {
                "required": True,
                "content": {
                    "application/json": {"schema": by_kind[own.body], "example": own.example}
                },
            }
        refused = (
            {} if own.error else {"content": {"application/json": {"schema": by_kind[Errors]}}}
        )
        for status, text in REFUSALS.items():
            told["responses"][status] = {"description": text, **refused}
        paths.setdefault(own.path, {})[own.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "bertsmith", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
