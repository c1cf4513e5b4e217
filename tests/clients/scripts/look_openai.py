import json
import time

from common import SEEN, TOLD, URL, num_pictures, picture, picture_url, report
from ollama import Client
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = {"model": "scripted", "temperature": 0}


def messages(*shades: int) -> list:
    images = [{"type": "image_url", "image_url": {"url": picture_url(shade), "detail": "auto"}} for shade in shades]
    return [{"role": "user", "content": [*images, {"type": "text", "text": SEEN}]}]


def text() -> None:
    before = num_pictures()
    for count in (1, 2, 5):
        whole = client.chat.completions.create(messages=messages(*range(count)), **asked)
        assert whole.choices[0].message.content == TOLD and whole.usage.prompt_tokens > 64 * count
    assert num_pictures() == before + 8


def stream() -> None:
    chunks = client.chat.completions.create(messages=messages(1, 2), stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TOLD


def responses() -> None:
    content = [{"type": "input_image", "image_url": picture_url(3)}, {"type": "input_text", "text": SEEN}]
    items = [{"role": "user", "content": content}]
    whole = client.responses.create(model="scripted", input=items, temperature=0)
    assert whole.output_text == TOLD and whole.usage.input_tokens > 64
    with client.responses.stream(model="scripted", input=items, temperature=0) as events:
        assert events.get_final_response().output_text == TOLD


def batch() -> None:
    body = asked | {"messages": messages(4, 5)}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    for _ in range(600):
        if (made := client.batches.retrieve(made.id)).status in ("completed", "failed"):
            break
        time.sleep(0.1)
    answers = client.files.content(made.output_file_id).text.splitlines()
    assert len(answers) == 3 and all(TOLD in line for line in answers)


def ollama() -> None:
    own = Client(host=URL)
    said = [{"role": "user", "content": SEEN, "images": [picture(6)]}]
    assert own.chat(model="scripted", messages=said).message.content == TOLD
    chunks = list(own.chat(model="scripted", messages=said, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == TOLD and chunks[-1].prompt_eval_count > 64
    assert "vision" in own.show("scripted").capabilities


report("openai", {"text": text, "stream": stream, "responses": responses, "batch": batch, "ollama": ollama})
