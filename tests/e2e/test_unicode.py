"""Text of many bytes a character, streamed: joined deltas are the text, no half of a character is ever sent."""

from typing import Any

import pytest

TEXT = "🦊 👩🏽‍🚀 says: 日本語のテキスト, e\u0301 and a\u0308, 한국어, ﬁ 🏳️‍🌈."


@pytest.mark.parametrize("logprobs", [None, 1])
def test_streamed_by_token_ids(client: Any, logprobs: int | None) -> None:
    body = {"structured_outputs": {"choice": [TEXT]}, "return_token_ids": True}
    options = {"model": "demo", "prompt": "Say it: ", "max_tokens": 256, "logprobs": logprobs, "extra_body": body}
    whole = client.completions.create(**options).choices[0]
    chunks = [c for c in client.completions.create(**options, stream=True) if c.choices]
    deltas = [c.choices[0].text for c in chunks]
    ids = [i for c in chunks for i in c.choices[0].model_extra.get("token_ids") or ()]
    assert "".join(deltas) == whole.text == TEXT
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(ids) > len(TEXT), "each of these characters is several tokens of the demo model"
    assert ids == whole.model_extra["token_ids"]
