"""The process in which chat templates are rendered: `python -m jaxserve.text.template_worker`.

It reads frames from stdin and writes one to stdout for each. The first is a TemplateSetup, answered once the template
is compiled. Each further frame is a TemplateInput. The kernel limits each of them: if one needs too much memory, the
answer is an error; if it takes too much CPU time, the kernel ends this process.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from typing import Any

import msgspec

from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import SpecialTokenEscaper
from jaxserve.transport.child import framed, limit_memory, read_frame, take_pipes, write


class TemplateSetup(msgspec.Struct):
    """The template, and the limits of its process.

    special_texts: texts that are escaped in users' texts. cpu_seconds: CPU time of each frame, also to compile
    """

    source: str
    tools_source: str | None
    special_tokens: dict[str, str]
    special_texts: list[str]
    cpu_seconds: float
    memory_bytes: int


class TemplateInput(msgspec.Struct):
    """The arguments of `ChatTemplate.render`, with the client's own texts."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] | None = None


class Rendered(msgspec.Struct):
    """The answer to a frame: a text, or an error.

    error: a RequestError's message, or the TemplateSetup's; `param` is its field.
    """

    text: str = ""
    error: str | None = None
    param: str | None = None


_SETUP = msgspec.json.Decoder(TemplateSetup)
_INPUT = msgspec.json.Decoder(TemplateInput)


class _TemplateServer:
    def __init__(self, setup: TemplateSetup) -> None:
        self.setup = setup
        self.escaper = SpecialTokenEscaper(setup.special_texts)
        tools = setup.tools_source
        self.template = ChatTemplate(setup.source, tools_source=tools, special_tokens=setup.special_tokens)

    def answer(self, body: bytes) -> Rendered:
        """Render one conversation; an error becomes a message."""
        signal.setitimer(signal.ITIMER_PROF, self.setup.cpu_seconds)
        try:
            return Rendered(self._render(_INPUT.decode(body)))
        except RequestError as error:
            return Rendered(error=error.message, param=error.param)
        except (MemoryError, RecursionError, msgspec.MsgspecError):
            return Rendered(error="the messages are nested too deep or too large", param="messages")
        except Exception as error:  # a template may raise anything
            return Rendered(error=f"the chat template refused these messages: {error!r:.300}", param="messages")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _render(self, conversation: TemplateInput) -> str:
        return self.template.render(
            self.escaper.value(conversation.messages),
            tools=self.escaper.value(conversation.tools),
            documents=self.escaper.value(conversation.documents),
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            kwargs=conversation.kwargs,
        )


def main() -> None:
    """Read a TemplateSetup and then TemplateInputs as frames from stdin; write a Rendered frame to stdout for each.

    Memory and CPU seconds are limited; too many CPU seconds end this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process when it has drained
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = take_pipes()
    body = read_frame(stdin)
    if body is None:
        return
    setup = _SETUP.decode(body)
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
    limit_memory(setup.memory_bytes)
    try:
        server = _TemplateServer(setup)
    except (ConfigError, MemoryError) as error:
        return write(stdout, framed(msgspec.json.encode(Rendered(error=str(error) or "it takes too much memory"))))
    signal.setitimer(signal.ITIMER_PROF, 0)
    write(stdout, framed(msgspec.json.encode(Rendered())))
    while (body := read_frame(stdin)) is not None:
        write(stdout, framed(_encoded(server.answer(body))))


def _encoded(rendered: Rendered) -> bytes:
    with contextlib.suppress(MemoryError, UnicodeEncodeError):
        return msgspec.json.encode(rendered)
    return msgspec.json.encode(Rendered(error="the prompt is too large or no text", param="messages"))


if __name__ == "__main__":
    sys.exit(main())
