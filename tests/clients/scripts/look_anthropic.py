import base64

from anthropic import Anthropic
from common import SEEN, TOLD, URL, num_pictures, picture, report

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": "scripted", "max_tokens": 50, "extra_body": {"temperature": 0}}


def image(shade: int) -> dict:
    data = base64.b64encode(picture(shade)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def messages(*shades: int) -> list:
    return [{"role": "user", "content": [*map(image, shades), {"type": "text", "text": SEEN}]}]


def text() -> None:
    before = num_pictures()
    whole = client.messages.create(messages=messages(0, 1), **asked)
    counted = client.messages.count_tokens(model="scripted", messages=messages(0, 1)).input_tokens
    assert whole.content[0].text == TOLD and num_pictures() == before + 2, (whole, before, num_pictures())
    used, cached, written = (
        getattr(whole.usage, f"{name}input_tokens") or 0 for name in ("", "cache_read_", "cache_creation_")
    )
    assert counted == used + cached + written > 2 * 64, (counted, used, cached, written)


def stream() -> None:
    with client.messages.stream(messages=messages(2), **asked) as events:
        assert events.get_final_text() == TOLD


def result() -> None:
    """A tool's result has the picture."""
    before = num_pictures()
    content = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image(3), {"type": "text", "text": "it"}]}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    said = [{"role": "user", "content": SEEN}, {"role": "assistant", "content": [use]}]
    tools = [{"name": "look", "description": "Look", "input_schema": {"type": "object", "properties": {}}}]
    asking = [*said, {"role": "user", "content": content}]
    assert client.messages.create(messages=asking, tools=tools, **asked).content[0].text == TOLD
    assert num_pictures() == before + 1


report("anthropic", {"text": text, "stream": stream, "result": result})
