"""The process in which pictures are decoded: `python -m jaxserve.media.worker`.

It reads frames from stdin and writes one to stdout for each. The first is a PictureSetup, each further one a
PictureQuestion. A picture that needs too much memory is an error; one that needs too much CPU time ends this process.
It runs at a lower priority than the server, whose streams it must not hold up.
"""

from __future__ import annotations

import binascii
import os
import resource
import signal
import sys

import msgspec

from jaxserve.errors import InvalidValueError
from jaxserve.media import images
from jaxserve.media.frames import PictureAnswer, PictureQuestion, PictureSetup
from jaxserve.transport.child import frame, framed, limit_memory, read_frame, take_pipes, write

NICENESS = 10

_SETUP = msgspec.msgpack.Decoder(PictureSetup)
_QUESTION = msgspec.msgpack.Decoder(PictureQuestion)
_BLANKS = b" \t\r\n\f\v"


def _answer(asked: PictureQuestion, setup: PictureSetup) -> PictureAnswer:
    signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
    try:
        data = _decoded(asked, setup.max_bytes)
        height, width = images.upright_size(data, setup.max_pixels)
        if asked.settings is None:
            return PictureAnswer(height, width)
        return PictureAnswer(height, width, images.patches(data, asked.settings, setup.max_pixels).tobytes())
    except images.PictureError as error:
        return PictureAnswer(error=str(error))
    except InvalidValueError as error:
        return PictureAnswer(error=error.message)
    except MemoryError:
        return PictureAnswer(error="The image needs too much memory.")
    except Exception:  # a decoder may raise anything about a damaged picture
        return PictureAnswer(error="The image is damaged and cannot be decoded.")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _decoded(asked: PictureQuestion, max_bytes: int) -> bytes:
    data = asked.data
    if asked.is_base64:
        try:
            data = binascii.a2b_base64(data.translate(None, _BLANKS), strict_mode=True)
        except binascii.Error:
            raise InvalidValueError("The image is no valid base64.") from None
    if not data:
        raise InvalidValueError("The image is empty.")
    if len(data) > max_bytes:
        raise InvalidValueError(f"The image has {len(data)} bytes; at most {max_bytes} are taken.")
    return data


def main() -> None:
    """Read a PictureSetup and then PictureQuestions as frames from stdin; write a PictureAnswer frame for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process when it has drained
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    stdin, stdout = take_pipes()
    body = read_frame(stdin)
    if body is None:
        return
    setup = _SETUP.decode(body)
    images.load_formats(setup.max_pixels)
    limit_memory(setup.memory_bytes)
    write(stdout, frame(PictureAnswer()))
    while (body := read_frame(stdin)) is not None:
        write(stdout, _encoded(_answer(_QUESTION.decode(body), setup)))


def _encoded(answer: PictureAnswer) -> bytes:
    try:
        return framed(msgspec.msgpack.encode(answer))
    except MemoryError:
        return frame(PictureAnswer(error="The image needs too much memory."))


if __name__ == "__main__":
    sys.exit(main())
