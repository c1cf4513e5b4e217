"""Conversations to prompts: rendered in this process if the template is cheap by construction, else in a worker."""

from __future__ import annotations

from jaxserve.text.chat_template import ChatTemplate, template_sources
from jaxserve.text.sandbox import RenderLimitError
from jaxserve.text.template_process import CPU_SECONDS, MEMORY_BYTES, TemplateProcess
from jaxserve.text.template_worker import TemplateInput, TemplateSetup, render
from jaxserve.text.tokenizer import SpecialTokenEscaper, Tokenizer

LONG_BYTES = 64 * 1024  # bytes of a request's body; a worker renders so much in 40 ms


class Renderer:
    """The chat template of one server.

    source: the template's text, by which the parser of the reasoning is chosen
    tools_source: the text of the template for requests with tools, by which the format of calls is chosen
    process: the worker, started when it is first needed
    long_process: the worker of long conversations, which take up to 1 s each, started likewise
    """

    def __init__(self, source: str, tools_source: str | None, tokenizer: Tokenizer) -> None:
        """Prepare the template. Raises ConfigError if it cannot be compiled."""
        self.source = source
        self.tools_source = tools_source or source
        special = tokenizer.special_tokens_map()
        self._escaper = SpecialTokenEscaper(tokenizer.special_texts)
        self._plain = ChatTemplate.load_plain(source, tools_source=tools_source, special_tokens=special)
        setup = TemplateSetup(source, tools_source, special, tokenizer.special_texts, CPU_SECONDS, MEMORY_BYTES)
        self.process = TemplateProcess(setup)
        self.long_process = TemplateProcess(setup)
        if self._plain is None:
            self.process.start()

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None = None) -> Renderer | None:
        """Load the operator's template (a file, or the template itself), else the tokenizer's; None if there is none.

        Raises ConfigError if it cannot be read or does not parse.
        """
        sources = template_sources(tokenizer, override)
        return None if sources is None else cls(*sources, tokenizer)

    def render_here(self, conversation: TemplateInput) -> str | None:
        """Return the prompt of a small conversation within 20 ms; None if only the worker may render it.

        Raises InvalidValueError if the template refuses the messages.
        """
        if self._plain is None:
            return None
        try:
            return render(self._plain, self._escaper, conversation)
        except (RenderLimitError, RecursionError, MemoryError):  # a worker has more room
            return None

    def render(self, conversation: TemplateInput, size: int = 0) -> str:
        """Return the prompt of any conversation. Blocks.

        Raises InvalidValueError if the template refuses the messages, or takes too much time or memory.

        size: bytes of the request's body. A body above LONG_BYTES goes to the worker of long conversations, so that it
        delays no shorter one.
        """
        return (self.long_process if size > LONG_BYTES else self.process).render(conversation)

    def stop(self) -> None:
        self.process.stop()
        self.long_process.stop()
