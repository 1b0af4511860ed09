"""From the fields of a row to a document: a text, a prompt with its completion, or a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dseekjax.data.reading.chat import NotAConversationError, Template
from dseekjax.data.reading.parts import Row, Segment


@dataclass(frozen=True)
class TextRow:
    """All of it counts."""

    field: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, values: Mapping[str, Any]) -> Row:
        text = values.get(self.field)
        return Row((Segment(text),)) if isinstance(text, str) else Row(None, _no_string(values, self.field))


@dataclass(frozen=True)
class CompletionRow:
    """Only the completion counts, and the end token after it."""

    prompt_field: str
    completion_field: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.prompt_field, self.completion_field)

    def read(self, values: Mapping[str, Any]) -> Row:
        for field in self.fields:
            if missing := _no_string(values, field):
                return Row(None, missing)
        prompt, completion = (values[field] for field in self.fields)
        if not completion or completion.isspace():
            return Row(None, f"has nothing but white space for {self.completion_field!r}")
        counted = Segment(completion)
        return Row((Segment(prompt, counts=False), counted) if prompt else (counted,))


@dataclass(frozen=True)
class ChatRow:
    """Only what the template writes for messages of the assistant counts."""

    messages_field: str
    template: Template

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.messages_field,)

    def read(self, values: Mapping[str, Any]) -> Row:
        if self.messages_field not in values:
            return Row(None, _no_field(values, self.messages_field))
        try:
            return Row(self.template.segments(values[self.messages_field]))
        except NotAConversationError as error:
            return Row(None, f"{error} in {self.messages_field!r}")


RowForm = TextRow | CompletionRow | ChatRow


def _no_string(values: Mapping[str, Any], field: str) -> str:
    """Why a field is no string, or nothing."""
    if field not in values:
        return _no_field(values, field)
    if isinstance(values[field], str):
        return ""
    kind = "null" if values[field] is None else f"a {type(values[field]).__name__}"
    return f"has {kind} for {field!r}, where a string is needed"


def _no_field(values: Mapping[str, Any], field: str) -> str:
    return f"has no field {field!r}, only {', '.join(sorted(map(repr, values))) or 'none'}"
