"""From RequestOutputs to the choices of /v1/chat/completions.

One function makes the deltas; an answer in one piece is those deltas joined, so that both forms are equal.
"""

from __future__ import annotations

from typing import Any

from jaxserve.api.generation import Job
from jaxserve.api.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.wire import finish_fields
from jaxserve.engine.output import RequestOutput


class ChatChoices:
    """The choices of one conversation."""

    def __init__(self, body: ChatCompletionRequest, job: Job, texts: TokenTexts) -> None:
        self._body = body
        self._job = job
        self._texts = texts
        self._begun: set[int] = set()

    def deltas(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks that `output` makes of its choice: the role once, text, and the finish alone at the end."""
        chunks = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            chunks.append(self._first(output))
        logprobs = self._logprobs(output)
        if output.text or logprobs is not None or (self._body.return_token_ids and output.token_ids):
            chunks.append(self._text(output, logprobs))
        if output.finish_reason is not None:
            finish = finish_fields(output, self._job.params.stop_token_ids)
            chunks.append({"index": output.index, "delta": {}, "logprobs": None} | finish)
        return chunks

    def _first(self, output: RequestOutput) -> dict[str, Any]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        chunk: dict[str, Any] = {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = self._job.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(
                output.prompt_logprobs or [], self._body.prompt_logprobs, self._texts
            )
        return chunk

    def _text(self, output: RequestOutput, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {"index": output.index, "delta": {"content": output.text}, "logprobs": logprobs, "finish_reason": None}
        return chunk | {"token_ids": output.token_ids} if self._body.return_token_ids else chunk

    def _logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if not (self._body.logprobs and output.logprobs):
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(output.logprobs, self._body.top_logprobs or 0, self._texts, as_ids)


class Joined:
    """The chunks of one choice, joined to the form of an answer in one piece."""

    def __init__(self, index: int) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        self.choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}

    def add(self, chunk: dict[str, Any]) -> None:
        for key, value in chunk["delta"].items():
            if isinstance(value, str) and key != "role":
                self.message[key] = (self.message.get(key) or "") + value
        if chunk["logprobs"] is not None:
            known = self.choice["logprobs"]
            content = [*known["content"], *chunk["logprobs"]["content"]] if known else chunk["logprobs"]["content"]
            self.choice["logprobs"] = chunk["logprobs"] | {"content": content}
        if "token_ids" in chunk:
            self.choice["token_ids"] = [*self.choice.get("token_ids", ()), *chunk["token_ids"]]
        for key in ("matched_stop", "stop_reason", "prompt_token_ids", "prompt_logprobs"):
            if key in chunk:
                self.choice[key] = chunk[key]
        self.choice["finish_reason"] = chunk["finish_reason"]

    def result(self) -> dict[str, Any]:
        return {"index": self.choice["index"], "message": self.message} | self.choice
