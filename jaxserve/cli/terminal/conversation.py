"""A conversation with a server over /v1/chat/completions: its messages, its settings, and how it is kept in a file."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from jaxserve.errors import ConfigError

Json = dict[str, Any]


@dataclass(frozen=True)
class ShownPart:
    """A piece of a streamed answer. thinking: it is reasoning. kind "end": text says why the answer ended."""

    kind: str  # text, thinking, tool or end
    text: str


@dataclass
class Conversation:
    """Sends questions with the messages before them.

    settings: fields of the request beside model and messages, for example temperature.
    """

    http: httpx2.Client
    model: str
    system: str = ""
    messages: list[Json] = field(default_factory=list)
    settings: Json = field(default_factory=dict)

    def ask(self, question: str) -> Generator[ShownPart, None, None]:
        """Add a question, stream the answer and add it too, also if the reader closes the iterator early.

        Raises ConfigError with the server's own message if it refuses the request; the question is then removed.
        """
        self.messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for part in self._stream():
                answer += part.text if part.kind == "text" else ""
                yield part
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[ShownPart]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.messages], **self.settings, "stream": True}
        ended = False
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != httpx2.codes.OK:
                    reply.read()
                    raise ConfigError(error_message(reply))
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for part in parts(json.loads(line[6:])):
                            ended = ended or part.kind == "end"
                            yield part
        except httpx2.HTTPError as error:
            raise ConfigError(f"the server ended the connection: {error}", fix="ask again") from None
        except ValueError as error:  # NaN or half a character in the conversation, or an event of another form
            raise ConfigError(f"the request or the answer is not JSON: {error}") from None
        if not ended:
            raise ConfigError("the server ended the stream before the answer was whole", fix="ask again")

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, readable by this user only. Raises ConfigError."""
        text = json.dumps({"system": self.system, "settings": self.settings, "messages": self.messages}, indent=1)
        try:
            path.touch(0o600)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace the conversation by one that `save` wrote. Raises ConfigError and changes nothing if it is none."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"{path} is not JSON") from None
        except RecursionError:
            raise ConfigError(f"{path} is nested too deeply") from None
        kinds = {"system": str, "settings": dict, "messages": list}
        if not isinstance(saved, dict) or not all(isinstance(saved.get(key), kind) for key, kind in kinds.items()):
            raise ConfigError(f"{path} is no saved conversation")
        self.system, self.settings, self.messages = (saved[key] for key in kinds)


def parts(chunk: Json) -> Iterator[ShownPart]:
    """Yield the reasoning, text and tool calls of one parsed chunk, and its finish reason as a ShownPart "end".

    Raises ConfigError if the chunk is an error.
    """
    if error := chunk.get("error"):
        raise ConfigError(str(error.get("message", error)))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        for kind, key in (("thinking", "reasoning_content"), ("text", "content")):
            if delta.get(key):
                yield ShownPart(kind, delta[key])
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            yield ShownPart("tool", (function.get("name") or "") + (function.get("arguments") or ""))
        if reason := choice.get("finish_reason"):
            yield ShownPart("end", reason)


def error_message(reply: httpx2.Response) -> str:
    """Return the message of an error response."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {reply.status_code}"
