"""Chat templates: messages and tools to the prompt's text, with the sandbox and globals that model authors expect.

Decides which template is used, which values it sees, and how much time and output it may take. The template comes from
the operator or the model, never from a request. Of tokens it knows only the texts of special tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from jaxserve.errors import ConfigError, InvalidValueError
from jaxserve.text.json_cost import JsonLimits, over_limit
from jaxserve.text.reader import whole_characters
from jaxserve.text.sandbox import RenderBudget, RenderLimitError, TemplateEnvironment
from jaxserve.text.tokenizer import Tokenizer

# Names the server sets itself; a request's chat_template_kwargs may not.
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("tokenizer_kwargs", "return_assistant_tokens_mask", "tokenizer", "self", RenderBudget.NAME),
    }
)
_TESTS_TEXT = re.compile(r"content[\w\]'\"]*\s+is\s+(not\s+)?(string|iter)")
_TESTS_NONE = re.compile(r"content['\"\]]*\s*(is|==|!=)\s*(not\s+)?none", re.IGNORECASE)
_NINE = re.compile(r"(?<![a-z])id['\"\]]*\s*(\|\s*length\s*[!=<>]=?\s*9\b|\[-9:\])")  # in Mistral's templates
_KIMI = "<|tool_call_argument_begin|>"
_CALL_WITHOUT_TEXT = (
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "callcall0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "callcall0", "name": "f", "content": "1"},
)
_CONTINUE = "\ufdd1continue\ufdd1"
MAX_SECONDS = 1.0
MAX_CHARS = 16 * 2**20


SYSTEM_ROLES = ("developer", "latest_reminder", "root")  # kinds of system messages of some families


class ChatTemplate:
    """One compiled template and, if the model has one, its variant for requests with tools.

    source: the template's text, by which the parsers of the output are chosen
    """

    def __init__(
        self,
        source: str,
        *,
        tools_source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        max_seconds: float = MAX_SECONDS,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """Raises ConfigError for a template that does not parse."""
        environment = TemplateEnvironment()
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._new_budget = partial(RenderBudget, max_seconds, max_chars)
        self._default = self._for_tools = self._compiled(environment, source)
        if tools_source:
            self._for_tools = self._compiled(environment, tools_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text.

        If users' texts were escaped (`SpecialTokenEscaper`), all special tokens in it are the template's own.

        messages: in OpenAI's form, as plain JSON types
        add_generation_prompt: None leaves it undefined, which a few templates test
        kwargs: chat_template_kwargs, e.g. {"enable_thinking": False}

        Raises InvalidValueError (param messages or chat_template_kwargs) for a reserved name, if the template refuses
        the conversation, or if it exceeds the limits on time (1 s) or output (16 MiB).
        """
        variables = check_kwargs(kwargs)
        template, form = self._for_tools if tools else self._default
        prepared = form.prepare_all(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidValueError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            _mark_final(prepared)
        variables |= self.special_tokens | {
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
        }
        if add_generation_prompt is not None:
            variables["add_generation_prompt"] = add_generation_prompt
        text = self._run(template, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _compiled(self, environment: TemplateEnvironment, source: str) -> tuple[jinja2.Template, MessageForm]:
        template, form = _compile(environment, source), MessageForm(environment, source)
        forms = ([None] if form.tests_none else []) + ["", [{"type": "text", "text": ""}]]
        form.no_text = next((each for each in forms if self._renders_calls_with(each, template, form)), "")
        return template, form

    def _renders_calls_with(self, content: Any, template: jinja2.Template, form: MessageForm) -> bool:
        """Return whether the template renders a message with calls and this content without printing None."""
        messages = form.prepare_all(_CALL_WITHOUT_TEXT)
        messages[1]["content"] = content
        variables = self.special_tokens | {"messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            return "None" not in self._run(template, variables) or content is not None
        except InvalidValueError:
            return False

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        budget = self._new_budget()
        try:
            return budget.join(template.generate(variables | {RenderBudget.NAME: budget}))
        except RenderLimitError as error:
            raise InvalidValueError(f"the chat template was stopped: {error}", param="messages") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidValueError(f"the chat template refused these messages: {error}", param="messages") from error
        except (RecursionError, MemoryError) as error:
            raise InvalidValueError("the messages are nested too deep or too large", param="messages") from error


class MessageForm:
    """The form of messages that one template expects, as far as its text tells.

    wants_parts: it walks through content parts; other templates get the parts' text joined
    foreign_roles: roles that it does not know and that it gets as system messages
    tests_none: it tests somewhere whether a content is None
    no_text: the content of an assistant's message without text: None (only beside calls), an empty text or part
    """

    def __init__(self, environment: TemplateEnvironment, source: str) -> None:
        self.wants_parts = _walks_content(environment.parse_only(source))
        self.foreign_roles = {role for role in SYSTEM_ROLES if not re.search(rf"""["']{role}["']""", source)}
        self._wraps_text = self.wants_parts and not _TESTS_TEXT.search(source)
        self.tests_none = bool(_TESTS_NONE.search(source))
        self.no_text: Any = ""
        self._call_id = _nine_characters if _NINE.search(source) else _kimi_id if _KIMI in source else _any_id

    def prepare_all(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation as the template expects it, see `prepare`. Ids of calls get the template's form."""
        prepared = [self.prepare(message) for message in messages]
        _rename_calls(prepared, self._call_id)
        return prepared

    def prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as the template expects it: a known role, content text or parts, arguments as objects.

        Clients send messages back with `tool_calls: null` or `[]`. Many templates only ask whether the key is there.
        """
        prepared = {key: value for key, value in message.items() if value is not None}
        if not prepared.get("tool_calls", True):
            del prepared["tool_calls"]
        if prepared.get("role") in self.foreign_roles:
            prepared["role"] = "system"
        prepared["content"] = self._content(prepared.get("content"), prepared)
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = [_parsed_call(call) for call in prepared["tool_calls"]]
        reasoning = next((prepared[k] for k in ("reasoning_content", "reasoning", "thinking") if prepared.get(k)), None)
        if isinstance(reasoning, str):  # templates differ in the name
            prepared |= {"reasoning_content": reasoning, "thinking": reasoning}
        return prepared

    def _content(self, content: Any, message: Mapping[str, Any]) -> Any:
        if not content and message.get("role") == "assistant":
            is_none = self.no_text is None and content is None and message.get("tool_calls")
            return None if is_none else self.no_text or ""
        if content is None:
            return ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wraps_text else content
        parts = [_text_part(part) if part.get("type") in _TEXT_PARTS else part for part in content]
        if self.wants_parts:
            return parts
        return "\n".join(part["text"] for part in parts if part.get("type") == "text")


ARGUMENT_LIMITS = JsonLimits(structures=40_000, values=192 * 1024)  # per call; over them its text is not decoded

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _text_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a content part that has text, under the only type name that templates know."""
    return {**part, "type": "text", "text": part.get("text") or part.get("refusal") or ""}


class Arguments(dict[str, Any]):
    """A call's arguments as templates take them: some walk through the object, some join it as JSON text."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


def check_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return chat_template_kwargs as a new dict. Raises InvalidValueError for a name that the server sets."""
    for name in kwargs or {}:
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise InvalidValueError(f"{name!r} cannot be set by chat_template_kwargs", param="chat_template_kwargs")
    return dict(kwargs or {})


def _compile(environment: TemplateEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except (jinja2.TemplateSyntaxError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise ConfigError(f"the chat template does not parse: {error}", fix="see model.chat_template") from error


def _key(node: nodes.Node) -> str | None:
    """Return "key" for both `x.key` and `x["key"]`, else None."""
    match node:
        case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
            return key
    return None


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    return node is not None and _key(node) == "content"


def _reads_part(loop: nodes.For) -> bool:
    accesses = (nodes.Getattr, nodes.Getitem)
    return any(_key(node) in ("type", "text") for child in loop.body for node in child.find_all(accesses))


def _walks_content(tree: nodes.Template) -> bool:
    """Return whether a for loop of the template goes over message.content, perhaps by another name."""
    none: frozenset[str] = frozenset()
    assigned = frozenset(
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, none)
    )
    macros = frozenset(a.name for m in tree.find_all(nodes.Macro) for a in m.args if a.name == "content")
    loops = tree.find_all(nodes.For)
    return any(_is_content(loop.iter, assigned | macros) and _reads_part(loop) for loop in loops)


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with an object as arguments, which OpenAI sends as JSON text.

    A model may have written other text, or was cut. Templates walk through an object, so such text is put into one.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    given = function.get("arguments")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if isinstance(given, Mapping):
        arguments = Arguments(given, text)
    elif over_limit(text.encode(errors="replace"), ARGUMENT_LIMITS) or (arguments := _object(text)) is None:
        arguments = Arguments({"INVALID_JSON": text}, text)  # the key of Anthropic's documentation
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _object(text: str) -> Arguments | None:
    """Return the object in the JSON text; an empty one for no text or null; None for anything else.

    Half a character, which another server may have sent, becomes U+FFFD: a prompt cannot have one.
    """
    if text.strip() in ("", "null"):
        return Arguments({}, "{}")
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False) if "\\u" in text else ""
        if written != (mended := whole_characters(written)):
            value, text = json.loads(mended), mended
    except (ValueError, RecursionError):
        return None
    return Arguments(value, text) if isinstance(value, dict) else None


def _rename_calls(messages: list[dict[str, Any]], new_id: Callable[[str, str, int], str]) -> None:
    """Give calls and their results ids of the template's form. A result without an id belongs to the first open call.

    new_id: makes the id of a call from the client's, the name of the function, and the number of calls before it
    """
    known: dict[str, str] = {}
    open_ids: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            old = call.get("id") or f"call_{count}"
            known[old] = call["id"] = new_id(str(old), str(name), count)
            open_ids.append(call["id"])
            count += 1
        if message.get("role") == "tool":
            old = message.get("tool_call_id") or f"call_{count}"
            if message.get("tool_call_id") or not open_ids:
                new = known.get(old) or new_id(str(old), str(message.get("name")), count)
            else:
                new = open_ids[0]
            message["tool_call_id"] = new
            if new in open_ids:
                open_ids.remove(new)


def _any_id(given: str, name: str, count: int) -> str:
    return given


def _nine_characters(given: str, name: str, count: int) -> str:
    """Return an id for Mistral's templates, which accept only nine letters and digits. Equal ids stay equal."""
    if re.fullmatch("[A-Za-z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _kimi_id(given: str, name: str, count: int) -> str:
    """Return an id as Kimi K2 writes it: the function's name and the number of calls before."""
    return given if re.fullmatch(r"functions\.[^:\s]+:\d+", given) else f"functions.{name}:{count}"


def _mark_final(messages: list[dict[str, Any]]) -> None:
    """Put a mark and a space behind the last message's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str) and content:
        last["content"] = f"{content}{_CONTINUE} "
        return
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        last["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_CONTINUE} "}]
        return
    raise InvalidValueError("continue_final_message needs text in the last message", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    """Return the text before the mark. A template that trims texts has taken its space: it trims the text too."""
    head, mark, rest = text.rpartition(_CONTINUE)
    if not mark:
        raise InvalidValueError(
            "the chat template drops or changes the last message, it cannot be continued", param="messages"
        )
    return head if rest.startswith(" ") else head.rstrip()


def template_sources(tokenizer: Tokenizer, override: str | None) -> tuple[str, str | None] | None:
    """Return the text of the template to use and of its variant for requests with tools; None for a missing one."""
    if override is not None:
        return _read_override(override), None
    templates = tokenizer.chat_templates
    if not templates:
        return None
    return templates.get("default") or next(iter(templates.values())), templates.get("tool_use")


def _read_override(value: str) -> str:
    """Return the operator's template. `value` is a path unless it can only be a template."""
    if "{%" in value or "{{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {value!r} is neither a readable file nor a Jinja template ({error})",
            fix="give a path to a .jinja file or the template's text",
        ) from error
