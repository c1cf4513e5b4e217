import base64

from common import SEEN, TOLD, URL, num_pictures, picture, picture_url, report
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

openai = {"model": "scripted", "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
data = base64.b64encode(picture(1)).decode()
URL_FORM = {"type": "image_url", "image_url": {"url": picture_url(0)}}  # OpenAI's
# LangChain's own two
OWN_FORM = {"type": "image", "base64": data, "mime_type": "image/png"}
OLD_FORM = {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"}
SOURCE_FORM = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}  # Anthropic's
MODELS = (  # each with the forms that it takes
    (ChatOpenAI(**openai), (URL_FORM, OWN_FORM, OLD_FORM)),
    (ChatOpenAI(use_responses_api=True, **openai), (URL_FORM, OWN_FORM, OLD_FORM)),
    (ChatAnthropic(model="scripted", base_url=URL, api_key="none", max_retries=0), (URL_FORM, OWN_FORM, SOURCE_FORM)),
    (ChatOllama(model="scripted", base_url=URL, temperature=0), (URL_FORM, OWN_FORM)),
)
CALL = {"name": "look", "args": {}, "id": "call_1"}


def asked(*forms: dict) -> list:
    return [HumanMessage([*forms, {"type": "text", "text": SEEN}])]


def text() -> None:
    for model, forms in MODELS:
        before = num_pictures()
        for form in forms:
            answer = model.invoke(asked(form))
            assert answer.text == TOLD, (type(model), form["type"], answer)
            assert answer.usage_metadata["input_tokens"] > 64
        assert model.invoke(asked(forms[0], forms[1])).text == TOLD
        assert num_pictures() == before + len(forms) + 2, type(model)


def stream() -> None:
    for model, forms in MODELS:
        assert "".join(chunk.text for chunk in model.stream(asked(forms[0]))) == TOLD, type(model)


def batch() -> None:
    for model, forms in MODELS:
        answers = model.batch([asked(form) for form in forms])
        assert [answer.text for answer in answers] == [TOLD] * len(forms), type(model)


def tool_result() -> None:
    for model, forms in MODELS[:3]:  # Ollama's results are text
        before = num_pictures()
        said = [HumanMessage(SEEN), AIMessage("", tool_calls=[CALL]), ToolMessage([forms[0]], tool_call_id="call_1")]
        assert model.invoke(said).text == TOLD, type(model)
        assert num_pictures() == before + 1, type(model)


report("langchain-openai", {"text": text, "stream": stream, "batch": batch, "tool result": tool_result})
