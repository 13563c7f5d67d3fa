"""What a request says of the form of its answer: JSON, a schema, a grammar, tags."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm.errors import RequestError

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first wrong item is told: there may be a million."""


class _Strict(BaseModel):
    """No conversions: `"16"` is not an integer, `1` is not a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class _Lenient(_Strict):
    """Fields that are not known are left out."""

    model_config = ConfigDict(extra="ignore", strict=True)


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None

    def grammar(self) -> dict[str, Any]:
        """Keywords of StructuredOutputsParams; not for type text."""
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "structural_tag":
            return {"structural_tag": self._tag()}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError(
                "response_format of type json_schema needs json_schema.schema", "response_format"
            )
        return {"json": self.json_schema.schema_}

    def _tag(self) -> dict[str, Any]:
        """`format`, or the older `structures`: begin, schema and end of parts of the text, each
        entered at one of `triggers`."""
        if self.format is not None:
            return {"type": "structural_tag", "format": self.format}
        if not self.structures or not self.triggers:
            raise RequestError(
                "response_format of type structural_tag needs format, or structures and triggers",
                "response_format",
            )
        tags = [
            {
                "type": "tag",
                "begin": structure.get("begin", ""),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": structure.get("end", ""),
            }
            for structure in self.structures
        ]
        form = {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}
        return {"type": "structural_tag", "format": form}


class StructuredOutputs(_Strict):
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
