"""The pictures of a conversation: parts of a body become placeholders of the prompt, and `Picture`s for the engine.

    parts of a body -> PicturePart in the messages -> {"type": "image"} for the chat template
    one placeholder in the text -> one token id -> a run of `num_tokens` of them

A slice puts a PicturePart in the place of each picture. `taken_out` replaces them after the messages have their final
order, so that a picture stays with its place, whatever a template needs moved. A prompt is counted from the headers of
its pictures; only `read` decodes them. The text of a picture is in no message, log or error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.api.generate.tools import Message
from jaxserve.api.state import ServerState
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.media.processor import PictureSettings
from jaxserve.media.reader import ReadPicture, Source
from jaxserve.types.picture import Picture

SHOWN_PART = {"type": "image"}  # templates see it in the place of a picture
AREAS = 4  # all pictures of a prompt may have this many times the pixels of the largest one
_DATA = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)
_NO_URLS = "This server takes images as data: URLs; set media.allowed_hosts to fetch."


@dataclass(eq=False)
class PicturePart:
    """A picture in a message's list of parts. It is not JSON: templates get `SHOWN_PART` in its place.

    text: a data: URL, a URL, or base64 if `is_base64`. param: the body's field. detail, min_pixels, max_pixels: see
    `PictureSettings.within`. source: the bytes that `text` names, once they were read or fetched
    """

    text: str
    param: str
    detail: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    is_base64: bool = False
    source: Source | None = None


@dataclass(frozen=True)
class Placed:
    """A picture at its place in the prompt, which has `num_tokens` placeholders from `start` on."""

    part: PicturePart
    settings: PictureSettings
    num_tokens: int
    start: int = 0


def taken_out(
    messages: Sequence[Message], tools_show_pictures: Callable[[], bool]
) -> tuple[list[Message], list[PicturePart]]:
    """Return the messages as templates read them, and their pictures in order.

    tools_show_pictures: whether the template shows the pictures of a tool's result. If not, they follow the results in
    a user's message.
    """
    if not any(_has_picture(message) for message in messages):
        return list(messages), []
    if not tools_show_pictures():
        messages = _after_results(messages)
    found: list[PicturePart] = []
    shown = []
    for message in messages:
        if _has_picture(message):
            found += [part for part in message["content"] if isinstance(part, PicturePart)]
            parts = [SHOWN_PART if isinstance(part, PicturePart) else part for part in message["content"]]
            message = message | {"content": parts}
        shown.append(message)
    return shown, found


def _has_picture(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, PicturePart) for part in content)


def _after_results(messages: Sequence[Message]) -> list[Message]:
    """Move the pictures of tool results into a user's message behind the last result of the run."""
    out: list[Message] = []
    for is_tool, group in itertools.groupby(messages, key=lambda message: message.get("role") == "tool"):
        run = list(group)
        if not is_tool:
            out += run
            continue
        moved: list[Any] = []
        for message in run:
            if _has_picture(message):
                moved += [part for part in message["content"] if isinstance(part, PicturePart)]
                rest = [part for part in message["content"] if not isinstance(part, PicturePart)]
                message = message | {"content": rest or "The image follows."}
            out.append(message)
        if moved:
            out.append({"role": "user", "content": moved})
    return out


def joined_content(pieces: Sequence[str | PicturePart]) -> str | list[Any]:
    """Return the content of a message: a text, or parts if there is a picture. Neighbouring texts are joined."""
    if not any(isinstance(piece, PicturePart) for piece in pieces):
        return "\n".join(piece for piece in pieces if isinstance(piece, str) and piece)
    parts: list[Any] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        run = list(group)
        if not is_text:
            parts += run
        elif text := "\n".join(filter(None, map(str, run))):
            parts.append({"type": "text", "text": text})
    return parts


def picture_of_base64(text: str, param: str) -> PicturePart:
    """Return the picture of base64 text, which some clients send with the head of a data: URL."""
    return PicturePart(text, param, is_base64=_DATA.match(text) is None)


async def counted(parts: Sequence[PicturePart], state: ServerState) -> list[Placed]:
    """Return the pictures with their numbers of tokens, from their headers. Raises a RequestError that names one."""
    if not parts:
        return []
    reader = state.pictures
    most = reader.section.max_items
    if len(parts) > most:
        raise InvalidValueError(f"At most {most} image(s) may be provided in one prompt.", param=parts[most].param)
    found, pixels = [], 0
    for part in parts:
        settings = reader.settings.within(part.detail, part.min_pixels, part.max_pixels, part.param)
        source = part.source = part.source or await _source(part, state)
        size = await _named(part, state, lambda source=source: reader.size(source), len(source.data))
        pixels += size[0] * size[1]
        if pixels > AREAS * reader.section.max_pixels:
            message = f"{part.param}: the images have more than {AREAS * reader.section.max_pixels} pixels in all."
            raise InvalidValueError(message, param=part.param)
        try:
            num_tokens = settings.num_tokens(*size)
        except InvalidValueError as error:
            raise InvalidValueError(f"{part.param}: {error.message}", param=part.param) from None
        found.append(Placed(part, settings, num_tokens))
    return found


async def read(
    placed: Sequence[Placed], state: ServerState, namespace: str
) -> tuple[tuple[Picture, ...], list[ReadPicture]]:
    """Decode the pictures of a prompt. Return them for the engine, and the objects to hold until the request ends.

    Memory counts a picture as long as its object is held. namespace: the owner of the request and its cache_salt;
    namespaces share no picture
    Raises a RequestError that names a picture, and MediaMemoryError.
    """
    pictures, held = [], []
    for each in placed:
        source = each.part.source
        assert source is not None, "it was counted"

        def work(each: Placed = each, source: Source = source) -> ReadPicture:
            return state.pictures.read(source, each.settings, namespace)

        found = await _named(each.part, state, work, len(source.data))
        each.part.source = None  # frees the encoded bytes: the engine needs the patches only
        held.append(found)
        pictures.append(Picture(found.digest, found.patches, found.grid, each.start, found.num_tokens))
        state.metrics.pictures.inc()
        state.metrics.picture_tokens.inc(found.num_tokens)
    return tuple(pictures), held


def check_placeholders(text: str, placed: Sequence[Placed], state: ServerState) -> None:
    """Raise InvalidValueError unless the rendered text has one placeholder for each picture.

    Special tokens in users' texts are escaped, so all placeholders are the template's. Templates drop the pictures of
    some messages, and a dropped one would move all others.
    """
    shown = text.count(state.picture_placeholder)
    if shown != len(placed):
        message = f"The chat template shows {shown} of the {len(placed)} images; give images in user messages."
        raise InvalidValueError(message, param="messages")


def expanded(ids: Sequence[int], placed: Sequence[Placed], token_id: int) -> tuple[list[int], list[Placed]]:
    """Return the prompt with a run of placeholders for each one, and the pictures with their places. O(length)."""
    out: list[int] = []
    found: list[Placed] = []
    before = 0
    for each in placed:
        place = ids.index(token_id, before)
        out += ids[before:place]
        found.append(replace(each, start=len(out)))
        out += [token_id] * each.num_tokens
        before = place + 1
    return out + list(ids[before:]), found


async def _source(part: PicturePart, state: ServerState) -> Source:
    """Return the bytes that a part names, fetched if it is a URL of an allowed host."""
    text = part.text
    if part.is_base64:
        return await _of_text(text, 0, part, state)
    head = _DATA.match(text)
    if head is not None:
        return await _of_text(text, head.end(), part, state)
    if text[:5].lower() == "data:":
        raise InvalidValueError(f"{part.param}: only base64 data: URLs are supported.", param=part.param)
    if not text[:8].lower().startswith(("http://", "https://")):
        message = f"{part.param}: an image is a data: URL or begins with http:// or https://."
        raise InvalidValueError(message, param=part.param)
    if not state.config.media.allowed_hosts:
        raise UnsupportedParameterError(f"{part.param}: {_NO_URLS}", param=part.param)
    data = await state.picture_fetches.run(lambda: state.picture_fetcher.fetch(text, part.param), 1)
    return await state.picture_work.run(lambda: Source.of(data, is_base64=False), len(data))


async def _of_text(text: str, start: int, part: PicturePart, state: ServerState) -> Source:
    def work() -> Source:
        try:
            return Source.of(text[start:].encode("ascii"), is_base64=True)
        except UnicodeEncodeError:
            raise InvalidValueError(f"{part.param}: The image is no valid base64.", param=part.param) from None

    return await state.picture_work.run(work, len(text))


async def _named(part: PicturePart, state: ServerState, work: Any, size: int) -> Any:
    """Run work on a picture in its thread. Its errors name the part."""
    try:
        return await state.picture_work.run(work, size)
    except InvalidValueError as error:
        raise InvalidValueError(f"{part.param}: {error.message}", param=part.param, code=error.code) from None
