"""Conversations to prompts, in template workers: no template can hold up or fill the process that serves."""

from __future__ import annotations

from jaxserve.text.chat_template import template_sources
from jaxserve.text.template_process import CPU_SECONDS, MEMORY_BYTES, TemplateProcess
from jaxserve.text.template_worker import TemplateInput, TemplateSetup
from jaxserve.text.tokenizer import Tokenizer

LONG_BYTES = 64 * 1024  # bytes of a request's body; a worker renders so much in 40 ms


class Renderer:
    """The chat template of one server.

    source: the template's text, by which the parser of the reasoning is chosen
    tools_source: the text of the template for requests with tools, by which the format of calls is chosen
    process: the worker, which runs from the start
    long_process: the worker of long conversations, which take up to 1 s each; the first of them starts it
    """

    def __init__(self, source: str, tools_source: str | None, tokenizer: Tokenizer) -> None:
        """Start the worker and compile the template in it. Raises ConfigError if it cannot be compiled."""
        self.source = source
        self.tools_source = tools_source or source
        special = tokenizer.special_tokens_map()
        setup = TemplateSetup(source, tools_source, special, tokenizer.special_texts, CPU_SECONDS, MEMORY_BYTES)
        self.process = TemplateProcess(setup)
        self.long_process = TemplateProcess(setup)
        self.process.start()

    @classmethod
    def load(cls, tokenizer: Tokenizer, override: str | None = None) -> Renderer | None:
        """Load the operator's template (a file, or the template itself), else the tokenizer's; None if there is none.

        Raises ConfigError if it cannot be read or does not parse.
        """
        sources = template_sources(tokenizer, override)
        return None if sources is None else cls(*sources, tokenizer)

    def render(self, conversation: TemplateInput, size: int = 0) -> str:
        """Return the prompt. Blocks.

        Raises InvalidValueError if the template refuses the messages, or takes too much time or memory.

        size: bytes of the request's body. A body above LONG_BYTES goes to the worker of long conversations, so that it
        delays no shorter one.
        """
        return (self.long_process if size > LONG_BYTES else self.process).render(conversation)

    def stop(self) -> None:
        self.process.stop()
        self.long_process.stop()
