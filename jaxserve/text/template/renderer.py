"""Conversations to prompts: in this process where that is cheap by construction, else in the template worker."""

from __future__ import annotations

from jaxserve.text.shield import Shield
from jaxserve.text.template.chat_template import ChatTemplate, template_sources
from jaxserve.text.template.sandbox import RenderLimitError
from jaxserve.text.template.template_process import CPU_SECONDS, MEMORY_BYTES, TemplateProcess
from jaxserve.text.template.template_worker import Conversation, Setup, render
from jaxserve.text.tokenizer import Tokenizer


class Renderer:
    """The chat template of one server.

    Attributes:
        source: the template's text (parsers of the output are chosen by it)
        process: the worker; it is started when it is first needed
    """

    def __init__(self, source: str, tools_source: str | None, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a template that cannot be compiled."""
        self.source = source
        special = tokenizer.special_tokens_map()
        self._shield = Shield(tokenizer.special_texts)
        self._plain = ChatTemplate.load_plain(source, tools_source=tools_source, special_tokens=special)
        self.process = TemplateProcess(
            Setup(source, tools_source, special, tokenizer.special_texts, CPU_SECONDS, MEMORY_BYTES)
        )
        if self._plain is None:
            self.process.start()

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None = None) -> Renderer | None:
        """The operator's template (a file, or the template itself), else the tokenizer's; None without any.

        Raises ConfigError.
        """
        sources = template_sources(tokenizer, override)
        return None if sources is None else cls(*sources, tokenizer)

    def render_here(self, conversation: Conversation) -> str | None:
        """The prompt of a small conversation, within 20 ms; None where only the worker may tell. Raises
        InvalidValueError for messages that the template refuses."""
        if self._plain is None:
            return None
        try:
            return render(self._plain, self._shield, conversation)
        except RenderLimitError:
            return None

    def render(self, conversation: Conversation) -> str:
        """The prompt of any conversation. Blocks. Raises InvalidValueError for messages that the template refuses or
        that take too much."""
        return self.process.render(conversation)

    def stop(self) -> None:
        self.process.stop()
