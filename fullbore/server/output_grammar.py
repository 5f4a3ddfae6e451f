"""The parameters that limit an output to a grammar: OpenAI's response_format, and what vLLM has beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from fullbore.errors import RequestError
from fullbore.server.errors import ApiError
from fullbore.server.strict import FIRST_ERROR, Strict, refuse_unsupported
from fullbore.text.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)

Schema = dict[str, Any] | str  # as an object, or its JSON text
Texts = Annotated[list[str], FIRST_ERROR]


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", description="Default: any JSON object.")] = None
    strict: Annotated[bool | None, Field(description="Schemas are always followed to the letter.")] = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """One of these."""

    # Not called `json`: pydantic's models have a method of that name.
    json_: Annotated[Schema | None, Field(alias="json", description="A JSON schema.")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: Annotated[str | None, Field(description="In llguidance's dialect of Lark.")] = None
    json_object: bool | None = None


class OutputGrammar(Strict):
    """Fields of requests of both kinds. At most one of them may limit the output."""

    response_format: Annotated[
        ResponseFormat | None, Field(description="json_object, or json_schema with a schema to follow.")
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, Field(description="vLLM's form.")] = None
    guided_json: Annotated[Schema | None, Field(description="vLLM's older form of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, Field(description="As structured_outputs.regex.")] = None
    guided_choice: Annotated[Texts | None, Field(description="As structured_outputs.choice.")] = None
    guided_grammar: Annotated[str | None, Field(description="As structured_outputs.grammar.")] = None

    def output_grammar(self) -> tuple[str, str] | None:
        """The parameter that limits the output, and the grammar that it gives; None: nothing does.

        Raises:
            ApiError, RequestError: there are several, or one is wrong.
        """
        given = [*self._of_response_format(), *self._of_structured_outputs()]
        if len(given) > 1:
            names = " and ".join(name for name, _ in given)
            raise ApiError(400, f"{names} cannot be combined; give one of them.", given[1][0])
        for name, make in given:
            try:
                return name, make()
            except RequestError as error:
                raise RequestError(str(error), name) from error
        return None

    def _of_response_format(self) -> list[tuple[str, Callable[[], str]]]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        refuse_unsupported(wanted.model_extra or {}, "response_format.")
        if wanted.type == "json_object":
            return [("response_format", json_object_grammar)]
        if wanted.json_schema is None:
            raise ApiError(400, "response_format.json_schema is required.", "response_format.json_schema")
        refuse_unsupported(wanted.json_schema.model_extra or {}, "response_format.json_schema.")
        schema = wanted.json_schema.schema_
        if schema is None:
            return [("response_format", json_object_grammar)]
        return [("response_format", lambda: json_schema_grammar(schema))]

    def _of_structured_outputs(self) -> list[tuple[str, Callable[[], str]]]:
        wanted = self.structured_outputs or StructuredOutputs()
        refuse_unsupported(wanted.model_extra or {}, "structured_outputs.")
        makers: dict[str, Callable[[Any], str]] = {
            "structured_outputs.json": _schema_grammar,
            "structured_outputs.regex": regex_grammar,
            "structured_outputs.choice": choice_grammar,
            "structured_outputs.grammar": lark_grammar,
            "guided_json": _schema_grammar,
            "guided_regex": regex_grammar,
            "guided_choice": choice_grammar,
            "guided_grammar": lark_grammar,
        }
        own = (wanted.json_, wanted.regex, wanted.choice, wanted.grammar)
        values = (*own, self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        given: list[tuple[str, Callable[[], str]]] = [
            (name, lambda make=make, value=value: make(value))  # type: ignore[misc]
            for (name, make), value in zip(makers.items(), values, strict=True)
            if value is not None
        ]
        if wanted.json_object:
            given.append(("structured_outputs.json_object", json_object_grammar))
        return given


def _schema_grammar(schema: Schema) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The schema is not JSON: {error}.") from error
    return json_schema_grammar(schema)
