import base64

from common import SEEN, TOLD, URL, num_pictures, picture, picture_url, report
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="scripted", base_url=f"{URL}/v1", api_key="none", temperature=0, max_retries=0)
data = base64.b64encode(picture(1)).decode()
FORMS = (  # OpenAI's, and LangChain's own two
    {"type": "image_url", "image_url": {"url": picture_url(0)}},
    {"type": "image", "base64": data, "mime_type": "image/png"},
    {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
)


def text() -> None:
    before = num_pictures()
    for form in FORMS:
        assert model.invoke([HumanMessage([form, {"type": "text", "text": SEEN}])]).content == TOLD
    assert num_pictures() == before + len(FORMS)


def stream() -> None:
    asked = [HumanMessage([FORMS[0], {"type": "text", "text": SEEN}])]
    assert "".join(chunk.content for chunk in model.stream(asked)) == TOLD


def batch() -> None:
    asked = [[HumanMessage([form, {"type": "text", "text": SEEN}])] for form in FORMS]
    assert [answer.content for answer in model.batch(asked)] == [TOLD] * len(FORMS)


report("langchain-openai", {"text": text, "stream": stream, "batch": batch})
