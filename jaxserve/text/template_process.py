"""The parent's side of the template worker: one conversation at a time.

process = TemplateProcess(setup)
text = process.render(conversation)  # blocks: call it from a thread
process.stop()
"""

from __future__ import annotations

import logging

import msgspec

from jaxserve.errors import ConfigError, InvalidValueError, ServerError
from jaxserve.text.template_worker import Rendered, TemplateInput, TemplateSetup
from jaxserve.transport.child_process import ChildEnded, ChildProcess

CPU_SECONDS = 3.0  # CPU time of a frame; the render itself has 1 s, and compiling 256 KiB takes 2 s
MEMORY_BYTES = 1 << 30

_RENDERED = msgspec.json.Decoder(Rendered)

logger = logging.getLogger(__name__)


class TemplateProcess(ChildProcess):
    """A worker that has compiled the template."""

    fix = "see model.chat_template"

    def __init__(self, setup: TemplateSetup) -> None:
        super().__init__("jaxserve.text.template_worker", msgspec.json.encode(setup))

    def render(self, conversation: TemplateInput) -> str:
        """Return the prompt's text. Raises InvalidValueError if the template refuses it or exceeds a limit."""
        try:
            body = msgspec.json.encode(conversation)
        except (UnicodeEncodeError, RecursionError):
            raise InvalidValueError("the messages are no text or nested too deep", param="messages") from None
        try:
            rendered = _RENDERED.decode(self.ask(body))
        except ConfigError as error:  # it was compiled before: the machine is too busy, or full
            logger.error("the template worker does not start: %s", error)
            raise ServerError("the chat template cannot be rendered now; the server's log says why") from error
        except (ChildEnded, msgspec.MsgspecError):
            if self.is_stopped:
                raise ServerError("the server stops") from None
            message = "the chat template was stopped: it takes too long or too much memory"
            raise InvalidValueError(message, param="messages") from None
        if rendered.error is not None:
            raise InvalidValueError(rendered.error, param=rendered.param)
        return rendered.text

    def _refusal(self, answer: bytes | None) -> str | None:
        if answer is None:
            return "the chat template takes too long or too much memory to compile"
        return _RENDERED.decode(answer).error
