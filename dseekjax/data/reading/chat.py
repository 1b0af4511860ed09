"""Conversations as text, by the chat templates that tokenizers of Hugging Face carry.

A template is a Jinja program, and runs in Jinja's sandbox with what the library transformers gives it: the variables
`messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `tools` and `documents` (both none), the functions
`raise_exception` and `strftime_now`, the filter `tojson`, and loop controls.
"""

import functools
import importlib.resources
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dseekjax.data.reading.parts import Segment
from dseekjax.data.tokenizers import TOKENIZER_CONFIG, special_token
from dseekjax.errors import UserError

BUILT_IN = ("chatml", "plain")
ROLES = ("system", "developer", "user", "assistant", "tool")
# How markup is written that is one token, by OpenAI, Meta, Qwen and DeepSeek among others.
MARKUP = re.compile(r"<[|｜][^<>\s{}]+[|｜]>")
ENDS_WITH_MARKUP = re.compile(rf"{MARKUP.pattern}\Z")
# What stands for a token where a message begins, also by Google and Mistral.
TAG = re.compile(r"<[^<>\s{}]+>|\[/?[A-Z_]+\]")
# Digits and no words, which templates would write in capitals or between quotes.
FOUND_AGAIN = "31415926535897932384626433"
PROBE = [
    {"role": role, "content": content}
    for role, content in zip(("user", "assistant") * 2, ("asking", "answering", "inquiring", "replying"), strict=True)
]

Message = dict[str, Any]


class NotAConversationError(Exception):
    """Some messages, or what a template makes of them, cannot be trained on; says why."""


@dataclass(frozen=True)
class Template:
    """How messages become a text, and which of it is the assistant's."""

    source: str
    bos_token: str
    eos_token: str
    end_of_document: str
    """The token that is put after each conversation."""

    def segments(self, messages: Any) -> tuple[Segment, ...]:
        """The text of a conversation; what counts is what each message of the assistant adds to it, and what ends it.

        That is found by writing the conversation up to that message, with the prompt to answer, and up to and with it:
        each has to be the beginning of the next. Where the template writes nothing after an answer, the next message
        begins with what ends the turn. White space after the end of a turn does not count, and is left out at the end
        of the conversation; so is an end of the document there, which is put after any document.

        Args:
            messages: `[{"role": …, "content": …}, …]`; other keys are the template's affair.

        Raises:
            NotAConversationError: they are not that, hold no answer, or the template makes none of them.
        """
        _check(messages)
        found, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self._continued(done, messages, number, add_generation_prompt=True)
                answered = self._continued(asked, messages, number + 1)
                answer = answered[len(asked) :]
                if self._ends_turn(answer, message):
                    answer = answer.rstrip()
                elif number + 1 < len(messages):
                    answer += self._end_of_turn(answered, messages, number + 1)
                found += [Segment(asked[len(done) :], counts=False), Segment(answer)]
                done = asked + answer
        if messages[-1]["role"] != "assistant":
            whole = self._continued(done, messages, len(messages))
            asking = whole[len(done) :]
            found.append(Segment(asking.rstrip() if self._ends_turn(asking, messages[-1]) else asking, counts=False))
        found[-1] = found[-1]._replace(text=found[-1].text.removesuffix(self.end_of_document))
        return (*(segment for segment in found[:-1] if segment.text), found[-1])

    def refuse_unknown_tokens(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises UserError if markup, as `<|im_start|>`, would be cut into tokens of its letters."""
        # Of a role that is put between bars the source tells nothing.
        written = MARKUP.findall(self.source) + MARKUP.findall(self._render(PROBE, True))
        for word in [*written, *(token for token in (self.bos_token, self.eos_token) if token)]:
            if tokenizer.token_to_id(word) is None:
                raise UserError(
                    f"the chat template writes {word!r}, which is no token of the tokenizer; give the template that "
                    "belongs to the tokenizer, or plain, which needs none"
                )

    def _continued(
        self, before: str, messages: Sequence[Message], count: int, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of the first `count` messages, which begins with `before`."""
        text = self._render(messages[:count], add_generation_prompt)
        if not text.startswith(before):
            number = count if add_generation_prompt else count - 1
            raise NotAConversationError(
                f"has, by this chat template, another text before message {number} with it than without"
            )
        return text

    def _end_of_turn(self, answered: str, messages: Sequence[Message], number: int) -> str:
        """What a message writes first, to end the answer before it: a tag, or all before its own content."""
        # With a content that is found again, whatever else the template writes.
        marked = [*messages[:number], {**messages[number], "content": FOUND_AGAIN}]
        before, found, _ = self._continued(answered, marked, number + 1)[len(answered) :].partition(FOUND_AGAIN)
        marker = before.lstrip()
        space = before.removesuffix(marker)
        end = before.rstrip() if found else ""
        for token in (self.eos_token, self.end_of_document):
            if marker.startswith(token):
                end = space + token
        if tag := TAG.match(marker):
            end = space + tag[0]
        if not end:
            raise NotAConversationError(
                f"has, by this chat template, nothing that ends message {number - 1}, which is the assistant's,"
            )
        self._continued(answered + end, messages, number + 1)
        return end

    def _ends_turn(self, text: str, message: Message) -> bool:
        """Whether the template writes more than white space after the content of a message."""
        content = message["content"].strip()
        if content and content in text:
            return bool(text.partition(content)[2].strip())
        # It writes the content otherwise, or there is none.
        stripped = text.rstrip()
        return stripped.endswith((self.eos_token, self.end_of_document)) or bool(ENDS_WITH_MARKUP.search(stripped))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return _compiled(self.source).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=None,
                documents=None,
            )
        except Exception as error:  # A template is a program of its own and may fail in any way.
            raise NotAConversationError(f"has what the chat template refuses ({_one_line(error)})") from error


def load_template(spec: str, end_of_document: str) -> Template:
    """A template that holds its promises: it was tried on a conversation of four messages.

    `bos_token` and `eos_token` are those of the tokenizer_config.json, if that is given or lies beside the template;
    else nothing, and the end of a document.

    Args:
        spec: a built-in name, the path of a Jinja template, or of a tokenizer_config.json that has one.
        end_of_document: the token that is put after each conversation.

    Raises:
        UserError: there is none, or it is none, it leaves out what was said, or what is the assistant's cannot be told
            from what it writes.
    """
    if spec in BUILT_IN:
        built_in = importlib.resources.files("dseekjax.data") / "templates" / f"{spec}.jinja"
        template = Template(built_in.read_text(encoding="utf-8"), "", end_of_document, end_of_document)
    else:
        path = Path(spec).expanduser()
        settings = _tokenizer_config(path if path.suffix == ".json" else path.with_name(TOKENIZER_CONFIG))
        source = _named_template(path, settings) if path.suffix == ".json" else _read(path)
        bos_token, eos_token = (special_token(settings.get(name)) for name in ("bos_token", "eos_token"))
        template = Template(source, bos_token, eos_token or end_of_document, end_of_document)
    try:
        _compiled(template.source)
    except jinja2.TemplateError as error:
        raise UserError(f"{spec} is no Jinja template ({_one_line(error)}); mend it or give another") from error
    try:
        _refuse_left_out(spec, template._render(PROBE, False))
        template.segments(PROBE)
    except NotAConversationError as error:
        raise UserError(
            f"with {spec} it cannot be told which tokens are the assistant's: a conversation of user, assistant, user "
            f"and assistant {error}; give another template"
        ) from error
    return template


def _refuse_left_out(spec: str, text: str) -> None:
    """Jinja writes nothing where a name is misspelt, and a model would learn to answer nothing."""
    for message in PROBE:
        if message["content"] not in text:
            raise UserError(
                f"{spec} leaves out what the {message['role']} says: tried with {message['content']!r}, it writes "
                "nothing of that in its place; mend it (the text is message.content) or give another template"
            )


def _check(messages: Any) -> None:
    if not isinstance(messages, list):
        raise NotAConversationError(f"has a {type(messages).__name__}, where a list of messages is needed,")
    if not messages:
        raise NotAConversationError("has no messages")
    for number, message in enumerate(messages):
        where = f"as message {number}"
        if not isinstance(message, dict):
            raise NotAConversationError(f"has a {type(message).__name__} {where}, where an object is needed,")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise NotAConversationError(f"has {role!r} {where}, where its role is one of {', '.join(ROLES)},")
        if not isinstance(content, str):
            raise NotAConversationError(f"has a {type(content).__name__} {where}, where its content is a string,")
        if role == "assistant" and (not content or content.isspace()):
            raise NotAConversationError(f"has nothing but white space {where}, which is the assistant's,")
    if not any(message["role"] == "assistant" for message in messages):
        raise NotAConversationError("has no message of the assistant")


def _tokenizer_config(path: Path) -> dict[str, Any]:
    if not path.is_file() and path.name == TOKENIZER_CONFIG:
        return {}
    try:
        settings = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({_one_line(error)}); get it anew") from error
    return settings if isinstance(settings, dict) else {}


def _named_template(path: Path, settings: dict[str, Any]) -> str:
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise UserError(f"{path} has no chat_template; give a file that has one, or one of {', '.join(BUILT_IN)}")
    return source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"cannot read the chat template {path} ({reason}); give {', '.join(BUILT_IN)}, or the path of a .jinja or "
            f"{TOKENIZER_CONFIG}"
        ) from error


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes what would be HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
