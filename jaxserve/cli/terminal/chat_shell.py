"""The shell of `jaxserve chat`: reads questions and commands, shows the streamed answers as markdown."""

from __future__ import annotations

import contextlib
import json
import re
import readline
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from jaxserve.cli.terminal.conversation import Conversation
from jaxserve.errors import ConfigError

HISTORY = "~/.local/share/jaxserve/chat_history"
_HISTORY_LINES = 1000
_FENCE = "```"
_BLOCK = '"""'
# A model's text must not move the cursor or set the terminal's title. Bidirectional marks are harmless in a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def answer(talk: Conversation, question: str, console: Console, *, markdown: bool = True) -> str:
    """Ask, show the answer while it comes, and return why it ended. Raises ConfigError."""
    stream, reason = talk.ask(question), ""
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
    """Text of an answer: whole blocks as markdown above, the open one live below."""

    def __init__(self, console: Console, *, markdown: bool) -> None:
        self._console, self._markdown = console, markdown
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
        """Show thinking, tool calls and remarks dimmed. Not in a pipe, which gets the answer alone."""
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
    """Split a text into the blocks that are whole and the last one, which may go on. A fence is one block."""
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
    """Runs until Ctrl-D or /exit."""

    def __init__(self, talk: Conversation, console: Console) -> None:
        self._talk, self._console = talk, console
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/system": ("TEXT: set the system prompt, without TEXT show it", self._system),
            "/set": ("NAME VALUE: set a field of the request, as temperature 0.7; NAME alone unsets it", self._set),
            "/save": ("FILE: write the conversation", lambda name: self._talk.save(_path(name))),
            "/load": ("FILE: go on with a conversation", lambda name: self._talk.load(_path(name))),
            "/clear": (": begin anew", lambda _: self._talk.messages.clear()),
            "/image": ("FILE: refused, no model that is served takes images", self._image),
            "/help": (": show this", self._help),
            "/exit": (": end, as Ctrl-D does", self._exit),
        }

    def run(self) -> int:
        """Read and answer until the end of the input. Returns the exit code."""
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
        """Read one entry. Several lines stand between three quotes, or end in a backslash."""
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
            if word in ("/save", "/load") and not rest.strip():
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
            raise ConfigError(f"{name} is not set here")
        elif not value:
            self._talk.settings.pop(name, None)
        else:
            try:
                self._talk.settings[name] = json.loads(value, parse_constant=_no_number)
            except (ValueError, RecursionError):
                self._talk.settings[name] = value

    def _image(self, _: str) -> None:
        raise ConfigError("/image: no model that is served takes images")

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
    raise ValueError(name)  # NaN and Infinity are no JSON


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Keep the entries in a file that only this user can read. Without a writable home nothing is kept."""
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
