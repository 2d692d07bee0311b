"""Which JSON schemas the grammar compiler honours to the letter.

It ignores some keywords without a word, so a response could pass the grammar and fail the schema. Those are named here,
to be refused before they are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_DEEPEST = 64
_NEVER = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies")
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def unenforced(schema: Any, path: str = "schema", depth: int = 0) -> str | None:
    """Path of the first keyword that no grammar would enforce, or None; what is nested too deeply counts as one.

    `oneOf` passes as `anyOf`; `format` other than the standard ones is an annotation, as the standard has it.
    """
    if not isinstance(schema, Mapping):
        return None
    if depth > _DEEPEST:
        return f"{path[:40]}... (nested deeper than {_DEEPEST} schemas)"
    for keyword in _NEVER:
        if keyword in schema:
            return f"{path}.{keyword}"
    if schema.get("uniqueItems"):
        return f"{path}.uniqueItems"
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        return f"{path}.allOf"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        return f"{path}.pattern (together with a length)"
    if "$ref" in schema and not schema.keys() <= {"$ref", *_ANNOTATIONS, "$defs", "definitions"}:
        return f"{path}.$ref (together with other keywords)"
    for where, inner in _inside(schema, path):
        if found := unenforced(inner, where, depth + 1):
            return found
    return None


def _inside(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in _MAPS:
        named = schema.get(keyword)
        if isinstance(named, Mapping):
            yield from ((f"{path}.{keyword}.{name}", inner) for name, inner in named.items())
    for keyword in _LISTS:
        listed = schema.get(keyword)
        if isinstance(listed, list):
            yield from ((f"{path}.{keyword}[{i}]", inner) for i, inner in enumerate(listed))
    for keyword in _SINGLE:
        yield f"{path}.{keyword}", schema.get(keyword)
