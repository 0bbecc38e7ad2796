"""The OpenAPI document of the routes: made from the very classes by which bodies are read."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dpkit import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_FAILED = {
    "description": "What went wrong.",
    "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
}


class Described(Protocol):
    """A route, as far as it is described here."""

    @property
    def method(self) -> str:
        """Of HTTP."""

    @property
    def path(self) -> str:
        """A path that ends in a slash stands for all that begin with it."""

    @property
    def run(self) -> object:
        """What answers; its docstring describes it."""

    @property
    def body(self) -> type | None:
        """What its body is."""

    @property
    def access(self) -> str:
        """``open``: no key is needed."""


def document(routes: Sequence[Described]) -> dict[str, Any]:
    """Describe routes, as OpenAPI 3.1."""
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        path = f"{route.path}{{name}}" if route.path.endswith("/") else route.path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dpkit", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Described, by_body: dict[type, dict[str, Any]]) -> dict[str, Any]:
    summary = inspect.cleandoc(getattr(route.run, "__doc__", None) or "").partition("\n")[0]
    told: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "As asked."}, "default": _FAILED},
    }
    if route.path.endswith("/"):
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        told["parameters"] = [name]
    if route.body is not None:
        content = {"application/json": {"schema": by_body[route.body]}}
        told["requestBody"] = {"required": True, "content": content}
    if route.access != "open":
        told["security"] = [{"key": []}, {}]  # without keys, nobody needs one
    return told
