from common import FRANCE, PARIS, PERSON, RESULT, SCHEMA, TOOL, URL, WEATHER, check_person, check_told, report
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

model = ChatOpenAI(model="demo", base_url=f"{URL}/v1", api_key="none", temperature=0, max_retries=0)


def text() -> None:
    assert model.invoke(FRANCE).content == PARIS


def stream() -> None:
    chunks = [chunk.content for chunk in model.stream(FRANCE)]
    assert len(chunks) > 3 and "".join(chunks) == PARIS


def tools() -> None:
    call = model.bind_tools([TOOL]).invoke(WEATHER).tool_calls[0]
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


def tool_loop() -> None:
    bound = model.bind_tools([TOOL])
    called = bound.invoke(WEATHER)
    result = ToolMessage(str(RESULT).replace("'", '"'), tool_call_id=called.tool_calls[0]["id"])
    check_told(bound.invoke([HumanMessage(WEATHER), called, result]).content)


def schema() -> None:
    titled = {"title": "person", "description": "A person", **SCHEMA}
    check_person(model.with_structured_output(titled, method="json_schema").invoke(PERSON))


def logprobs() -> None:
    found = model.bind(logprobs=True, top_logprobs=2).invoke(FRANCE).response_metadata["logprobs"]["content"]
    assert found[0]["token"] == "The"


def embeddings() -> None:
    made = OpenAIEmbeddings(model="demo", base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False)
    first, second = made.embed_documents(["a cat", "a dog"])
    assert len(first) == len(second) > 1


report(
    "langchain-openai",
    {
        "text": text,
        "stream": stream,
        "tools": tools,
        "tool loop": tool_loop,
        "JSON schema": schema,
        "logprobs": logprobs,
        "embeddings": embeddings,
    },
)
