"""Write the items of a Responses answer, and the events that build them, from the events of a turn."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxserve.api.respond.wire import is_object
from jaxserve.text.events import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

Json = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_PART_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
CALL_KINDS = frozenset(_CALL_EVENTS)
ITEM_KINDS = frozenset(_PREFIXES)
_NOTHING: frozenset[str] = frozenset()


class ItemWriter:
    """Turn the events of a turn into items. One item is open at a time.

    call_names: returns the fields that name a called tool, given the name that the model knows
    seal: returns sealed reasoning; None: reasoning is not sealed
    """

    def __init__(self, call_names: Callable[[str], dict[str, str]], seal: Callable[[str], str] | None = None) -> None:
        self.items: list[Json] = []  # those that are done
        self._call_names = call_names
        self._seal = seal
        self._numbers = 0  # events so far
        self._item: Json | None = None  # the open one
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[Json] = []  # likewise
        self._is_text = False  # the open item is a message
        self._delta: Json = {}  # what all deltas of the open item have

    def event(self, kind: str, **fields: Any) -> Json:
        """Return an event with the next sequence number."""
        number = self._numbers
        self._numbers = number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def write(self, events: Sequence[Event], logprobs: list[Json], cut: frozenset[str] = _NOTHING) -> Iterable[Json]:
        """Return the events for `events`.

        logprobs: of the tokens of the text among them. cut: the kinds of item that are not whole if these events end
        the output in them
        """
        if len(events) == 1 and type(event := events[0]) is ContentDelta and self._is_text and not logprobs:
            return (self._text_delta(event.text),) if event.text else ()  # the common case
        return self._written(events, logprobs, cut)

    def _written(self, events: Sequence[Event], logprobs: list[Json], cut: frozenset[str]) -> Iterator[Json]:
        for event in events:
            match event:
                case ContentDelta(text):
                    if text:
                        yield from self._in_item("message")
                        event = self._text_delta(text)
                        yield self._with_logprobs(event, logprobs) if logprobs else event
                        logprobs = []
                case ReasoningDelta(text):
                    yield from self._in_item("reasoning")
                    yield self._text_delta(text)
                case ToolCallStart():
                    yield from self._start_call(event)
                case ToolCallDelta(_, text):
                    yield self._text_delta(text)
                case ToolCallEnd():
                    yield from self.close(cut if event is events[-1] else _NOTHING)

    def finish(self, cut: frozenset[str]) -> Iterator[Json]:
        """Close the open item. An answer without any item gets a message with an empty text."""
        if self._item is None and not self.items:
            yield from self._in_item("message")
        yield from self.close(cut)

    def close(self, cut: frozenset[str] = _NOTHING) -> Iterator[Json]:
        """Close the open item, if there is one. It is not whole if its kind is in `cut`."""
        item = self._item
        if item is None:
            return
        text = "".join(self._texts)
        kind = item["type"]
        is_whole = kind not in cut or (kind == "function_call" and is_object(text))
        done = self._call_done(item, text) if kind in _CALL_EVENTS else self._part_done(item, text)
        yield from done
        if kind == "reasoning" and self._seal is not None and (sealed := self._seal(text)):
            item["encrypted_content"] = sealed
        item["status"] = "completed" if is_whole else "incomplete"
        self.items.append(item)
        self._item, self._is_text = None, False
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _call_done(self, item: Json, text: str) -> Iterator[Json]:
        kind, field = _CALL_EVENTS[item["type"]]
        item[field] = text
        named = {"name": item["name"]} if field == "arguments" else {}
        yield self.event(f"{kind}.done", **self._place(), **named, **{field: text})

    def _part_done(self, item: Json, text: str) -> Iterator[Json]:
        kind, part, place = _PART_EVENTS[item["type"]], self._part(item["type"], text), self._place(content_index=0)
        shown = {}
        if item["type"] == "message":
            part["logprobs"] = self._logprobs
            shown = {"logprobs": [without_bytes(entry) for entry in self._logprobs]}
        item["content"] = [part]
        yield self.event(f"{kind}.done", **place, text=text, **shown)
        yield self.event("response.content_part.done", **place, part=part)

    def _in_item(self, kind: str) -> Iterator[Json]:
        """Open a message or a reasoning, unless one is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self.close()
        fields = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield self._open(kind, fields | {"content": []})
        place = self._place(content_index=0)
        yield self.event("response.content_part.added", **place, part=self._part(kind, ""))
        self._delta = {"type": f"{_PART_EVENTS[kind]}.delta", **place}
        if kind == "message":
            self._is_text = True
            self._delta["logprobs"] = []

    def _start_call(self, event: ToolCallStart) -> Iterator[Json]:
        yield from self.close()
        kind = "custom_tool_call" if event.custom else "function_call"
        name, field = _CALL_EVENTS[kind]
        yield self._open(kind, {"call_id": event.id, **self._call_names(event.name), field: ""})
        self._delta = {"type": f"{name}.delta", **self._place()}

    def _open(self, kind: str, fields: Json) -> Json:
        item_id = f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"
        self._item = {"type": kind, "id": item_id, **fields, "status": "in_progress"}
        self._texts, self._logprobs = [], []
        return self.event("response.output_item.added", output_index=len(self.items), item=dict(self._item))

    def _text_delta(self, text: str) -> Json:
        self._texts.append(text)
        number = self._numbers
        self._numbers = number + 1
        return {**self._delta, "sequence_number": number, "delta": text}

    def _with_logprobs(self, event: Json, logprobs: list[Json]) -> Json:
        self._logprobs += logprobs
        return event | {"logprobs": [without_bytes(entry) for entry in logprobs]}

    def _place(self, **more: int) -> Json:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.items), **more}

    def _part(self, kind: str, text: str) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def without_bytes(entry: Json) -> Json:
    """Return a token's log-probability as events show it."""
    shown = {"token": entry["token"], "logprob": entry["logprob"]}
    if "top_logprobs" in entry:
        shown["top_logprobs"] = [without_bytes(top) for top in entry["top_logprobs"]]
    return shown
