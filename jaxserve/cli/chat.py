"""`jaxserve chat [MODEL]`: talk to a model in the terminal, at a running server (--url) or at one that it starts.

In a pipe the input is one question: `echo question | jaxserve chat`. In a terminal, Ctrl-C stops the answer, Ctrl-D
ends the program, and /help lists the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence

import httpx2
from rich.console import Console

from jaxserve.bench.load import root_url
from jaxserve.cli.options.arguments import api_key
from jaxserve.cli.terminal.chat_shell import ChatShell, answer
from jaxserve.cli.terminal.conversation import Conversation, error_message
from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.transport.child import child_environment, python_command

_CARD = "jaxserve is ready"
_STOP_SECONDS = 30.0


def run(words: Sequence[str]) -> int:
    """Run the command `chat`. Raises ConfigError if no server answers or starts."""
    options, rest = _parser().parse_known_args(words)
    name = None if options.url is None else _only_name(rest)
    # A file is read before a server is started for it; what writes into a pipe may take its time.
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
    """Return the model's name for a running server, or None if there is none. Raises ConfigError for anything else."""
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

    Returns 1, with a line on stderr, if the answer is not whole.
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
    """Yield the address of the server: the running one, or one that lives as long as this context.

    words: model and flags of the one that is started; launch knows which word is a flag's value
    """
    if options.url is not None:
        yield options.url
        return
    command = python_command("jaxserve.cli.owned_server", "--port", "0", "--logging.level", "warning", *words)
    # A session of its own: Ctrl-C is for the answer, not for the server.
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
