"""Pictures of a request: they cross the socket, and pictures that a model cannot read are refused."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve.errors import InvalidValueError
from jaxserve.types.messages import Add, decode_to_engine, encode
from jaxserve.types.picture import Picture, PictureInfo, check_pictures
from jaxserve.types.sampling import EngineRequest, SamplingParams

PAD = 7
INFO = PictureInfo(
    kind="qwen3_vl", patch_size=2, merge_size=2, width=12, token_id=PAD, max_tokens=4, mean=(0.5,), std=(0.5,)
)
PROMPT = [1, 5, PAD, PAD, 6, PAD, 2]
PICTURE = Picture(b"d" * 32, b"p" * 12 * 8, (1, 2, 4), 2, 2)


def test_siblings_get_the_pictures_of_their_request():
    request = EngineRequest(request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(), pictures=(PICTURE,))
    other = msgspec.structs.replace(request, request_id="b")
    message = decode_to_engine(encode(Add.of(request, other)))
    assert isinstance(message, Add)
    assert [each.pictures for each in message.requests()] == [(PICTURE,), (PICTURE,)]


def test_a_picture_that_fits_its_place_is_accepted():
    check_pictures((PICTURE,), INFO, PROMPT)
    check_pictures((), None, PROMPT)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 1},  # not at placeholders
        {"start": 6},  # ends after the prompt
        {"num_tokens": 1},
        {"grid": (1, 1, 8)},  # not whole tokens
        {"grid": (2, 2, 2)},  # two frames
        {"patches": b"p"},
    ],
    ids=str,
)
def test_a_picture_that_does_not_fit_is_refused(changes: dict[str, object]):
    with pytest.raises(InvalidValueError):
        check_pictures((msgspec.structs.replace(PICTURE, **changes),), INFO, PROMPT)


def test_pictures_that_overlap_and_models_without_a_tower_are_refused():
    with pytest.raises(InvalidValueError, match="overlap"):
        check_pictures((PICTURE, PICTURE), INFO, PROMPT)
    with pytest.raises(InvalidValueError, match="no pictures"):
        check_pictures((PICTURE,), None, PROMPT)
