"""The exception tree: drawn as it is, and every HTTP error has the four keys of OpenAI's body."""

import pytest

from jaxserve import errors
from jaxserve.errors import HTTPError, JaxserveError

TREE = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, JaxserveError)]


@pytest.mark.parametrize("kind", TREE)
def test_the_drawing_names_every_error(kind: type[JaxserveError]) -> None:
    if kind is not HTTPError:
        assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", [kind for kind in TREE if issubclass(kind, HTTPError)])
def test_every_http_error_has_a_body(kind: type[HTTPError]) -> None:
    error = kind("what happened", param="field")
    assert 400 <= error.status < 600
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert error.body()["error"]["param"] == "field"


def test_the_code_can_be_given() -> None:
    assert errors.NotFoundError("gone", code="file_not_found").body()["error"]["code"] == "file_not_found"
    assert errors.NotFoundError("gone").body()["error"]["code"] is None
