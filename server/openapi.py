"""The OpenAPI document, made from the models that requests are read by."""

import functools
import importlib.metadata
from typing import Any

from pydantic.json_schema import models_json_schema

from server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_POSTS = {
    "/v1/completions": (CompletionRequest, "Continues prompts."),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
_GETS = {
    "/v1/models": "All models.",
    "/v1/models/{id}": "One model.",
    "/health": "200 if every engine serves, else 503 and why.",
    "/ping": "As /health.",
    "/version": "Of jpaged.",
    "/load": "Requests that are being answered.",
    "/metrics": "For Prometheus.",
}
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
                "code": {"type": "integer"},
            },
        }
    },
}


@functools.cache
def document(root_path: str = "") -> dict[str, Any]:
    """The document of a server whose paths have a prefix."""
    kinds = [(kind, "validation") for kind, _ in _POSTS.values()]
    schemas, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # pyright: ignore[reportArgumentType]
    components: dict[str, Any] = definitions.get("$defs", {}) | {"Error": _ERROR}
    error = {
        "description": "What is wrong.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    fine = {"description": "The answer."}
    statuses = ("400", "401", "404", "413", "415", "500", "503")
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _POSTS.items():
        schema = schemas[(kind, "validation")]
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": {"200": fine} | dict.fromkeys(statuses, error),
            }
        }
    for path, summary in _GETS.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": fine, "401": error, "404": error, "503": {"description": "Why."}},
        }
        if "{id}" in path:
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": importlib.metadata.version("jpaged")},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
