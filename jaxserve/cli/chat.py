"""`jaxserve chat [MODEL]`: talk to a model in the terminal, at a running server (--url) or at one that it starts.

In a pipe the input is one question: `echo question | jaxserve chat`. In a terminal, answers are shown as markdown,
Ctrl-C stops the answer, Ctrl-D ends the program, and /help lists the commands, which can save a conversation to a file.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import mimetypes
import os
import re
import readline
import stat
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from jaxserve.bench.load import root_url
from jaxserve.cli.options import api_key
from jaxserve.config import suggestion
from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.transport.child import child_environment, python_command

Json = dict[str, Any]


@dataclass(frozen=True)
class ShownPart:
    """A piece of a streamed answer. The text of the kind "end" says why the answer ended."""

    kind: str  # text, thinking, tool or end
    text: str


@dataclass
class Conversation:
    """A conversation with a server over /v1/chat/completions.

    settings: fields of the request beside model and messages, for example temperature
    pictures: data: URLs that the next question takes along
    """

    http: httpx2.Client
    model: str
    system: str = ""
    messages: list[Json] = field(default_factory=list)
    settings: Json = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)

    def ask(self, question: str) -> Generator[ShownPart, None, None]:
        """Add a question, stream the answer and add it too, even if the reader closes the iterator early.

        If the server refuses the request, the question is removed. Raises ConfigError with the server's message.
        """
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures]
        content = [*shown, {"type": "text", "text": question}] if shown else question
        self.pictures.clear()
        self.messages.append({"role": "user", "content": content})
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
        except ValueError as error:  # the conversation has NaN or half a character, or an event has another form
            raise ConfigError(f"the request or the answer is not JSON: {error}") from None
        if not ended:
            raise ConfigError("the server ended the stream before the answer was whole", fix="ask again")

    def add_picture(self, path: Path) -> None:
        """Give the next question a picture. Raises ConfigError if the file cannot be read."""
        kind = mimetypes.guess_type(path.name)[0] or ""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        self.pictures.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")

    def save(self, path: Path) -> None:
        """Write the conversation as JSON, readable by this user only. Raises ConfigError."""
        text = json.dumps({"system": self.system, "settings": self.settings, "messages": self.messages}, indent=1)
        try:
            path.touch(0o600)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replace the conversation by one that `save` wrote. Raises ConfigError for another file, changing nothing."""
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
            raise ConfigError(f"{path} is no saved conversation", fix="/save writes one")
        check_settings(saved["settings"])
        self.system, self.settings, self.messages = (saved[key] for key in kinds)


def check_settings(settings: Json) -> None:
    """Raise ConfigError if a request may not have these fields, or if a name looks like a field's."""
    from pydantic import ValidationError  # noqa: PLC0415  start time, here and below

    from jaxserve.api.http.errors import from_validation  # noqa: PLC0415
    from jaxserve.api.openai.protocol import ChatCompletionRequest  # noqa: PLC0415

    known = ChatCompletionRequest.model_fields
    for name in settings.keys() - known.keys():
        if near := suggestion(name, known, cutoff=0.8):  # other servers have fields that this one has not
            raise ConfigError(f"no field {name}{near}")
    body: Json = {"model": "", "messages": []} | settings
    try:
        ChatCompletionRequest.model_validate_json(json.dumps(body))
    except (ValidationError, ValueError) as error:
        raise ConfigError(str(from_validation(error, body) if isinstance(error, ValidationError) else error)) from None


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


HISTORY = "~/.local/share/jaxserve/chat_history"
_HISTORY_LINES = 1000
_FENCE = "```"
_BLOCK = '"""'
# A model's text must not move the cursor or set the terminal's title. Bidirectional marks are harmless in a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def answer(talk: Conversation, question: str, console: Console, *, markdown: bool = True) -> str:
    """Ask, show the answer as it arrives, and return the reason for its end. Raises ConfigError."""
    stream = talk.ask(question)
    reason = ""
    with contextlib.closing(stream), contextlib.closing(_Page(console, markdown=markdown)) as page:
        for part in stream:
            if part.kind == "end":
                reason = part.text
                if reason != "stop":
                    page.note(f"[ended: {reason}]")
            elif part.kind == "thinking" and markdown:
                page.note(part.text, end="")
            elif part.kind == "tool" and markdown:
                page.note(part.text, end="")
            elif part.kind == "text":
                page.add(part.text)
    return reason


class _Page:
    """The text of an answer in a terminal: complete blocks as markdown above, the open block live below."""

    def __init__(self, console: Console, *, markdown: bool) -> None:
        self._console = console
        self._markdown = markdown
        self._open = ""
        self._last = "\n"
        self._live = Live(console=console, transient=True, refresh_per_second=12)
        if markdown:
            self._live.start()

    def add(self, text: str) -> None:
        """Show a piece of the answer."""
        if not self._markdown:
            self._last = text[-1:]
            self._console.out(_clean(text) if self._console.is_terminal else text, end="", highlight=False)
            return
        if self._last not in "\n":  # after notes
            self._console.print()
            self._last = "\n"
        self._open += _clean(text)
        done, self._open = split_blocks(self._open)
        if done.strip():
            self._console.print(_rendered(done))
        self._live.update(_rendered(self._open))

    def note(self, text: str, end: str = "\n") -> None:
        """Show reasoning, tool calls and remarks dimmed. A pipe gets only the answer."""
        if self._markdown:
            self._finish()
            self._console.print(Text(_clean(text), style="dim"), end=end)
            self._last = "x" if end == "" else end

    def close(self) -> None:
        if self._markdown:
            self._finish()
            self._live.stop()
        if self._last != "\n":
            self._console.print()

    def _finish(self) -> None:
        if self._open.strip():
            self._console.print(_rendered(self._open))
        self._open = ""
        self._live.update(Text())


def split_blocks(text: str) -> tuple[str, str]:
    """Split a text into its complete blocks and the last block, which may go on. A code fence is one block."""
    cut = at = 0
    fenced = False
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(_FENCE)
        at += len(line)
        if not fenced and not line.strip() and line.endswith("\n"):
            cut = at
    return text[:cut], text[cut:]


def _rendered(text: str) -> Markdown:
    return Markdown(text, hyperlinks=False)  # the address of a link is shown, not hidden behind its text


def _clean(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class ChatShell:
    """Read questions and commands, and show the answers, until Ctrl-D or /exit."""

    def __init__(self, talk: Conversation, console: Console) -> None:
        self._talk = talk
        self._console = console
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/system": ("TEXT: set the system prompt, without TEXT show it", self._system),
            "/set": ("NAME VALUE: set a field of the request, as temperature 0.7; NAME alone unsets it", self._set),
            "/save": ("FILE: write the conversation", lambda name: self._talk.save(_path(name))),
            "/load": ("FILE: go on with a conversation", lambda name: self._talk.load(_path(name))),
            "/clear": (": begin anew", lambda _: self._talk.messages.clear()),
            "/image": ("FILE: show the model a picture with the next question", self._image),
            "/help": (": show this", self._help),
            "/exit": (": end, as Ctrl-D does", self._exit),
        }

    def run(self) -> int:
        """Read and answer until the end of the input, and return the exit code."""
        self._console.print(f"{self._talk.model}: /help lists the commands, {_BLOCK} begins and ends several lines")
        with _history(), contextlib.suppress(EOFError):
            while True:
                try:
                    self._do(self._read())
                except KeyboardInterrupt:
                    self._console.print()
                except UnicodeError:
                    self._console.print(Text("the entry is not UTF-8", style="red"))
                except ConfigError as error:
                    fix = f" -> {error.fix}" if error.fix else ""
                    self._console.print(Text(_clean(f"{error}{fix}"), style="red"))
        return 0

    def _read(self) -> str:
        """Read one entry. An entry of several lines is inside three quotes, or its lines end in a backslash."""
        text = input(">>> ")
        if text.lstrip().startswith(_BLOCK):
            text = text.lstrip()[len(_BLOCK) :]
            while not text.rstrip().endswith(_BLOCK):
                text += "\n" + input("... ")
            return text.rstrip()[: -len(_BLOCK)].strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input("... ")
        return text

    def _do(self, entry: str) -> None:
        entry.encode()  # raises UnicodeEncodeError for bytes of the terminal that are not UTF-8
        word, _, rest = entry.strip().partition(" ")
        if not word:
            return
        if word.startswith("/") and word[1:].isalpha():
            if word not in self._commands:
                raise ConfigError(f"no command {word}", fix="/help lists them")
            if word in ("/save", "/load", "/image") and not rest.strip():
                raise ConfigError(f"{word} needs the name of a file")
            self._commands[word][1](rest.strip())
            return
        try:
            answer(self._talk, entry, self._console)
        except KeyboardInterrupt:
            self._console.print(Text("[stopped]", style="dim"))

    def _system(self, text: str) -> None:
        if text:
            self._talk.system = text
        else:
            self._console.print(Text(self._talk.system or "there is no system prompt"))

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            self._console.print(Text(json.dumps(self._talk.settings)))
        elif name in ("model", "messages", "stream"):
            raise ConfigError(f"{name} is not set here: the chat sets it itself")
        elif not value:
            self._talk.settings.pop(name, None)
        else:
            parsed: Any = value
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(value, parse_constant=_no_number)
            check_settings({name: parsed})
            self._talk.settings[name] = parsed

    def _image(self, name: str) -> None:
        self._talk.add_picture(_path(name))
        self._console.print(f"{len(self._talk.pictures)} with the next question")

    def _help(self, _: str) -> None:
        for word, (what, _do) in self._commands.items():
            self._console.print(Text(f"{word:8} {what}"))

    def _exit(self, _: str) -> None:
        raise EOFError


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name}: there is no such user") from None


def _no_number(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Keep the entries in a file that only this user can read. Without a writable home they are not kept."""
    path = Path(HISTORY)
    with contextlib.suppress(OSError, RuntimeError):
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


_CARD = "jaxserve is ready"
_STOP_SECONDS = 30.0


def run(words: Sequence[str]) -> int:
    """Run the command `chat`. Raises ConfigError if no server answers or starts."""
    options, rest = _parser().parse_known_args(words)
    name = None if options.url is None else _only_name(rest)
    # A file is read before a server starts for it. A program that writes into a pipe may take longer.
    at_once = not sys.stdin.isatty() and not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)
    question = _whole_input() if at_once else ""
    with _server(options, rest) as url:
        with _client(url, options.api_key) as http:
            served = _served(http, url)
            talk = Conversation(http, name or served[0], system=options.system)
            if sys.stdin.isatty():
                return ChatShell(talk, Console(soft_wrap=False)).run()
            return _answer_all(talk, question or _whole_input())


def _client(url: str, key: str | None) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx2.Client(base_url=url, headers=headers, timeout=httpx2.Timeout(600, connect=10))
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {url} is no address: {error}") from None


def _only_name(words: Sequence[str]) -> str | None:
    """Return the model's name for a running server; None without one. Raises ConfigError for any other word."""
    for index, word in enumerate(words):
        if index or word.startswith("-"):
            raise ConfigError(
                f"unknown argument {word}", fix="flags of launch need a server that chat starts: no --url"
            )
    return words[0] if words else None


def _whole_input() -> str:
    """Return the whole standard input as one question. Raises ConfigError if it is empty."""
    try:
        question = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise ConfigError("the question is not UTF-8") from None
    if not question:
        raise ConfigError("there is no question", fix="echo question | jaxserve chat")
    return question


def _answer_all(talk: Conversation, question: str) -> int:
    """Answer one question. The answer goes to stdout, errors to stderr.

    Returns 1, with a line on stderr, if the answer is not complete; else 0.
    """
    reason = answer(talk, question, Console(highlight=False), markdown=False)
    if reason == "stop":
        return 0
    print(f"jaxserve: the answer is not whole, it ended: {reason}", file=sys.stderr)
    return 1


def _served(http: httpx2.Client, url: str) -> list[str]:
    """Return the names that the server serves. Raises ConfigError."""
    try:
        reply = http.get("/v1/models")
    except httpx2.HTTPError as error:
        fix = "start it with jaxserve launch, or leave --url out"
        raise ConfigError(f"no server answers at {url}: {error}", fix=fix) from None
    if reply.status_code == httpx2.codes.UNAUTHORIZED:
        raise ConfigError(error_message(reply), fix="set --api-key or JAXSERVE_SERVER__API_KEY")
    if reply.status_code != httpx2.codes.OK:
        raise ConfigError(error_message(reply))
    try:
        if names := [str(model["id"]) for model in reply.json()["data"]]:
            return names
    except (ValueError, LookupError, TypeError):
        pass
    raise ConfigError(f"what answers at {url} serves no model of OpenAI's API", fix="set --url")


@contextlib.contextmanager
def _server(options: argparse.Namespace, words: Sequence[str]) -> Iterator[str]:
    """Yield the address of the running server, or of a server that lives as long as this context.

    words: model and flags of a server that is started; `launch` knows which word is a flag's value
    """
    if options.url is not None:
        yield options.url
        return
    quiet = ("--port", "0", "--logging.level", "warning")
    card = ("--logging.format", "text")  # the ready card is text
    command = python_command("jaxserve.cli.owned_server", *quiet, *words, *card)
    # It has a session of its own, so that Ctrl-C stops the answer, not the server.
    process = subprocess.Popen(
        command,
        env=child_environment() | ({"JAXSERVE_SERVER__API_KEY": options.api_key} if options.api_key else {}),
        stdin=subprocess.PIPE,  # it ends when this closes, however this process ends
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield _ready_url(process)
    finally:
        try:
            process.communicate(timeout=_STOP_SECONDS)  # closes its stdin
        except subprocess.TimeoutExpired:
            process.kill()


def _ready_url(process: subprocess.Popen[str]) -> str:
    """Wait for the ready card and return the address. Raises UnexpectedEndError."""
    assert process.stdout is not None
    ready = False
    for line in process.stdout:
        ready = ready or line.strip() == _CARD
        if ready and line.startswith("URL"):
            return root_url(line.split()[1])
    raise UnexpectedEndError("the server did not start", fix="see the line above, or run jaxserve doctor")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxserve chat",
        usage="jaxserve chat [MODEL] [--url URL] [--api-key KEY] [--system TEXT] [flags of jaxserve launch]",
        description=__doc__,
        epilog="MODEL is a hub id or a directory; with --url it is a name that the server serves.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", type=root_url, help="of a running server, with or without /v1")
    key = os.environ.get("JAXSERVE_SERVER__API_KEY") or os.environ.get("OPENAI_API_KEY")
    parser.add_argument(
        "--api-key", type=api_key, default=key, help="default: JAXSERVE_SERVER__API_KEY or OPENAI_API_KEY"
    )
    parser.add_argument("--system", default="", help="the system prompt")
    return parser
