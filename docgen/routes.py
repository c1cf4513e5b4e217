"""Write docs/routes.md and a page for each API in docs/routes/ from the models that validate requests.

python -m docgen.routes
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from pydantic import BaseModel

from jaxserve.api.anthropic.protocol import (
    Block,
    CountTokensRequest,
    EarlierThread,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    NewThread,
    OutputConfig,
    OutputFormat,
    Source,
    ThinkingConfig,
)
from jaxserve.api.fields import (
    JsonSchemaFormat,
    RepetitionDetection,
    ResponseFormat,
    SamplingFields,
    SessionParams,
    StreamOptions,
    StructuredOutputs,
)
from jaxserve.api.ollama.protocol import (
    OllamaCall,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    ShowRequest,
)
from jaxserve.api.openai.batches import CreateBatchRequest, OutputExpiresAfter
from jaxserve.api.openai.embeddings import EmbeddingRequest
from jaxserve.api.openai.files import UploadFields
from jaxserve.api.openai.protocol import (
    AllowedTools,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    CustomDefinition,
    CustomFormat,
    CustomGrammar,
    FunctionDefinition,
    NamedTool,
    Reasoning,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)
from jaxserve.api.openapi import type_text
from jaxserve.api.responses.protocol import (
    ConversationName,
    InputItem,
    ItemPart,
    ReasoningConfig,
    ResponsesRequest,
    ResponseStreamOptions,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextFormat,
    ToolInputFormat,
)
from jaxserve.api.scoring.protocol import (
    ClassifyRequest,
    DecisionChoice,
    DecisionItem,
    DecisionLevel,
    DecisionPart,
    DecisionQuestion,
    DecisionRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxserve.api.sessions import CloseSessionRequest, OpenSessionRequest
from jaxserve.api.sglang import adapters
from jaxserve.api.sglang.protocol import (
    AbortRequest,
    ContinueRequest,
    DetokenizeRequest,
    GenerateRequest,
    MemoryRequest,
    NativeSampling,
    PauseRequest,
    ReadWeightsRequest,
    TokenizeRequest,
    UpdateVersionRequest,
    UpdateWeightsRequest,
)
from jaxserve.front.app import ModelName

_ROUTES = """\
# Routes

Made by `python -m docgen.routes`; a test holds it to the code. The fields are on a page for each API, with examples:

| page | routes |
|---|---|
| [OpenAI](routes/openai.md) | conversations and completions |
| [Responses](routes/responses.md) | OpenAI's Responses, conversations |
| [Messages](routes/anthropic.md) | Anthropic's Messages |
| [Ollama](routes/ollama.md) | what is below `/api` |
| [Embeddings and scores](routes/scoring.md) | embeddings, rerank, score, classify, decisions |
| [SGLang](routes/sglang.md) | `/generate`, sessions, the tokenizer |
| [Files and batches](routes/files.md) | files, batches, the queries of lists |
| [For the operator](routes/operator.md) | weights, pauses, memory, several models |

| route | what |
|---|---|
| `POST /v1/chat/completions` | answer a conversation; a stream with `stream: true` |
| `POST /v1/completions` | continue prompts |
| `POST /v1/responses`, `POST /v1/responses/input_tokens` | OpenAI's Responses: Codex and the Agents SDK |
| `POST /v1/messages`, `POST /v1/messages/count_tokens` | Anthropic's Messages: Claude Code and the anthropic SDKs |
| `POST /api/chat`, `POST /api/generate`, `POST /api/embed`, `POST /api/embeddings` | Ollama's routes |
| `GET /api/tags`, `POST /api/show`, `GET /api/ps`, `GET /api/version` | the model, as Ollama's clients ask for it |
| `POST /v1/embeddings` | embed texts, with an encoder or a decoder's last hidden state |
| `POST /v1/rerank`, `POST /v1/score` | sort, score documents ([rerank.md](rerank.md)); also without `/v1` |
| `POST /v1/classify` | label texts, with a classification head; also without `/v1` |
| `POST /v1/decisions` | answer questions about an input by probabilities |
| `GET /v1/models`, `GET /v1/models/{id}` | the served names |
| `POST /v1/files`, `GET /v1/files` | upload a file, list the files |
| `GET /v1/files/{id}`, `GET /v1/files/{id}/content`, `DELETE /v1/files/{id}` | show, read or delete a file |
| `POST /v1/batches`, `GET /v1/batches` | start a batch, list the batches ([batches.md](batches.md)) |
| `GET /v1/batches/{id}`, `POST /v1/batches/{id}/cancel` | show or cancel a batch |
| `GET`, `DELETE /v1/responses/{id}` | show or delete a stored response ([responses.md](responses.md)) |
| `POST /v1/responses/{id}/cancel`, `GET /v1/responses/{id}/input_items` | cancel a background response; list an input |
| `POST /v1/conversations`; `GET`, `POST`, `DELETE /v1/conversations/{id}` | conversations |
| `POST`, `GET /v1/conversations/{id}/items` | add or list items |
| `GET /v1/conversations/{id}/items/{item}`, `DELETE` likewise | show or remove an item |
| `POST /generate` | SGLang's native form, with `meta_info` |
| `POST /open_session`, `POST /close_session` | SGLang's sessions, which `session_params` continues |
| `POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info` | use the tokenizer; the first two also under `/v1` |
| `GET /model_info`, `GET /server_info`, `GET /version` | what is served; also `/get_model_info`, `/get_server_info` |
| `GET /` | a [page](page.md) for browsers; `Ollama is running` for others |
| `GET /health` | 200 while requests are accepted and the engine runs; else 503 with phase, progress and `store` |
| `GET /health_generate` | 200 after the engine has made a token for any request; 503 if not within 20 s |
| `GET /live` | 200 while the process answers |
| `GET /metrics` | Prometheus |
| `GET /docs`, `GET /openapi.json` | this page with the responses, and as JSON |
| `GET /key_usage` | requests and tokens of each key of `server.keys`; needs the admin key |
| `POST /flush_cache` | drop the prefix cache; needs the admin key (`server.admin_api_key`), disabled without one |
| `POST /abort_request` | end requests; admin key, or with `server.keys` any key for its own requests |
| `POST /update_weights_from_disk`, `/update_weights_from_tensor` | new weights ([weights.md](weights.md)); admin key |
| `POST /update_weight_version` | another label for the weights; admin key |
| `POST /get_weights_by_name` | rows of one tensor of the weights in use; admin key |
| `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter` | adapters, as vLLM ([adapters.md](adapters.md)); admin key |
| `POST /load_lora_adapter`, `/unload_lora_adapter` | adapters, as SGLang; admin key |
| `POST /pause_generation`, `/continue_generation` | stop and go, as SGLang; admin key |
| `POST /pause`, `/resume`, `GET /is_paused` | the same as vLLM; admin key |
| `POST /release_memory_occupation`, `/resume_memory_occupation` | free memory, take it again, as SGLang; admin key |
| `POST /sleep`, `/wake_up`, `GET /is_sleeping` | the same as vLLM; admin key |
| `POST /reset_prefix_cache` | as `/flush_cache`; admin key |
| `GET /models`, `POST /models/load`, `/models/unload` | with [several models](several_models.md); admin key to load |

An error is `{"error": {"message", "type", "param", "code"}}`, except on Anthropic's and Ollama's routes;
`param` names the field ([errors.md](errors.md)). Null means that a field is absent. An unknown field is accepted and
logged once. A known field that is not supported is harmless to ignore or a 400 that names it ([fields.md](fields.md)).
Sampling fields that are not set have the value of the model's generation_config.json. `max_tokens` is limited
to the rest of the context; a prompt that leaves no room is a 400. JSON nested deeper than 200 levels is refused.
"""


_LISTS = """\
## Query of GET /v1/files, GET /v1/batches and the lists of items

| field | type and limits | meaning |
|---|---|---|
| `after` | string | id of the last entry of the previous page |
| `limit` | integer ≥ 1 ≤ 10000 (files), ≤ 100 (others) | entries per page; default 10000 (files), 20 (others) |
| `order` | asc or desc (not batches) | order by creation time; default desc |
| `purpose` | string (files) | only files with this purpose |
"""

_QUERIES = """\
## Query of the routes for weights, pauses and memory

| field | type and limits | meaning |
|---|---|---|
| `weight_version` | string of 1 to 128 characters (/update_weights_from_tensor) | label; default: a number |
| `abort_all_requests` | boolean (/update_weights_from_tensor) | end running requests; default false |
| `partial` | boolean (/update_weights_from_tensor) | parameters that are not in the file stay; default false |
| `flush_cache` | true (/update_weights_from_tensor) | only true: no prefix of old weights is ever used |
| `level` | 0, 1, 2 (/sleep) | only pause; weights to the host's memory; drop them; default 1 |
| `mode` | abort, wait or keep (/pause, /sleep) | what becomes of running requests; default abort |
| `clear_cache` | boolean (/pause) | with abort and wait: drop the prefix cache; default true |
| `tags` | weights, kv_cache, scheduling (/wake_up) | what to bring back; default all |
"""

PARTS: tuple[type[BaseModel], ...] = (
    *(
        ChatMessage,
        ContentPart,
        StreamOptions,
        ResponseFormat,
        JsonSchemaFormat,
        StructuredOutputs,
        RepetitionDetection,
    ),
    SessionParams,
    *(ToolCall, Tool, FunctionDefinition, CustomDefinition, CustomFormat, CustomGrammar),
    *(ToolChoice, NamedTool, AllowedTools, Reasoning, Thinking),
)
RESPONSES_PARTS: tuple[type[BaseModel], ...] = (
    *(InputItem, ItemPart, ResponseTool, ToolInputFormat, ResponseToolChoice),
    *(TextConfig, TextFormat, ReasoningConfig, ConversationName, ResponseStreamOptions),
)
MESSAGES_PARTS: tuple[type[BaseModel], ...] = (
    *(InputMessage, Block, Source, MessageTool, MessageToolChoice, ThinkingConfig, OutputConfig, OutputFormat),
    *(NewThread, EarlierThread),
)

OLLAMA_PARTS: tuple[type[BaseModel], ...] = (OllamaOptions, OllamaMessage, OllamaCall, OllamaFunction)

DECISION_PARTS: tuple[type[BaseModel], ...] = (
    *(DecisionItem, DecisionPart, DecisionQuestion, DecisionChoice, DecisionLevel),
)


_RESPONSES = """\
On `/v1/responses` a full queue is 503, because Codex gives up at a 429. What its body only offers (hosted tools, images
for a model that reads text) is dropped and logged once. Streams have named events with `sequence_number`.

[responses.md](../responses.md) is about stored responses, conversations and threads.
"""

_MESSAGES = """\
`/v1/messages` has Anthropic's form of errors, and its streams have named events. What its body only offers (tools that
Anthropic hosts, cache marks, images for a model that reads text) is dropped and logged once. A key is sent as
`Authorization: Bearer KEY` or `x-api-key: KEY`, on every route. A call whose arguments are no JSON object, or are
cut, has the input `{"INVALID_JSON": TEXT}`, Anthropic's own form for such text; in a stream the text comes as it is.
`thread` keeps the conversation on the server ([responses.md](../responses.md#threads-of-messages)). An error of a
thread has Anthropic's `error.details`, by which its SDKs go on with the whole conversation.
"""

_OLLAMA = """\
The routes below `/api` are Ollama's: errors are `{"error": "text"}`, streams are a JSON object a line, `stream` is true
by default, and a body needs no `Content-Type` unless a web page sends it. Routes that fetch, make or remove models
answer 501. A call whose arguments are no JSON object is text of the answer.
"""

_URL = "http://127.0.0.1:8000"


def _example(code: str, body: str, path: str) -> str:
    """Return an example of a Python client and the same with curl. code: "" if there is no client in the suite"""
    curl = f"curl {_URL}{path} -H 'Content-Type: application/json' -d '{body}'"
    python = f"```python\n{dedent(code).strip()}\n```\n\n" if code else ""
    return f"{python}```sh\n{curl}\n```\n"


_CLIENT = f"""
from openai import OpenAI

client = OpenAI(base_url="{_URL}/v1", api_key="none")
"""

_EXAMPLES = {
    "openai": _example(
        _CLIENT
        + """
messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=16)
print(answer.choices[0].message.content)
for chunk in client.chat.completions.create(model="demo", messages=messages, max_tokens=16, stream=True):
    print(chunk.choices[0].delta.content or "", end="")
""",
        '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}',
        "/v1/chat/completions",
    ),
    "responses": _example(
        _CLIENT
        + """
answer = client.responses.create(model="demo", input="What is the capital of France?", max_output_tokens=16)
print(answer.output_text)
""",
        '{"model": "demo", "input": "Hello", "max_output_tokens": 16}',
        "/v1/responses",
    ),
    "anthropic": _example(
        "",
        '{"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}',
        "/v1/messages",
    ),
    "ollama": _example(
        f"""
import ollama

client = ollama.Client("{_URL}")
print(client.chat(model="demo", messages=[{{"role": "user", "content": "Hello"}}]).message.content)
""",
        '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": false}',
        "/api/chat",
    ),
    "scoring": _example(
        _CLIENT
        + """
answer = client.embeddings.create(model="demo", input=["one", "two"])
print([len(each.embedding) for each in answer.data])
""",
        '{"model": "demo", "input": "one"}',
        "/v1/embeddings",
    ),
    "sglang": _example(
        "", '{"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}', "/generate"
    ),
    "files": _example(
        _CLIENT
        + """
line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "Hi"}}'
file = client.files.create(file=("in.jsonl", line), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
print(client.batches.retrieve(batch.id).status)
""",
        "",
        "/v1/files",
    ).partition("\n```sh")[0],
    "operator": f"```sh\ncurl {_URL}/server_info\n```\n",
}


def reference() -> dict[str, str]:
    """Return the pages by their path in docs/."""
    found = {"routes.md": _ROUTES}
    for name, (title, about, sections) in _pages().items():
        made = "Made by `python -m docgen.routes`; a test holds it to the code and runs the examples."
        head = [f"# {title}", "", made, "", *([about] if about else []), _EXAMPLES[name]]
        found[f"routes/{name}.md"] = "\n".join([*head, *sections]).rstrip("\n") + "\n"
    return found


def _pages() -> dict[str, tuple[str, str, list[str]]]:
    """Return for each API the page's title, what is true of all its routes, and the sections of fields."""
    return {
        "openai": (
            "Conversations and completions",
            "",
            [
                _section("Fields of chat/completions and completions", SamplingFields),
                _section("Fields of chat/completions", ChatCompletionRequest, SamplingFields),
                _section("Fields of completions", CompletionRequest, SamplingFields),
                *(_section(f"Parts: {part.__name__}", part) for part in PARTS),
            ],
        ),
        "responses": (
            "Responses",
            _RESPONSES,
            [
                _section("Fields of /v1/responses and /v1/responses/input_tokens", ResponsesRequest),
                *(_section(f"Parts of /v1/responses: {part.__name__}", part) for part in RESPONSES_PARTS),
            ],
        ),
        "anthropic": (
            "Messages",
            _MESSAGES,
            [
                _section("Fields of /v1/messages", MessagesRequest),
                _section("Fields of /v1/messages/count_tokens", CountTokensRequest),
                *(_section(f"Parts of /v1/messages: {part.__name__}", part) for part in MESSAGES_PARTS),
            ],
        ),
        "ollama": (
            "Ollama's routes",
            _OLLAMA,
            [
                _section("Fields of /api/chat", OllamaChatRequest),
                _section("Fields of /api/generate", OllamaGenerateRequest),
                _section("Fields of /api/embed", OllamaEmbedRequest),
                _section("Fields of /api/embeddings", OllamaEmbeddingsRequest),
                _section("Fields of /api/show", ShowRequest),
                *(_section(f"Parts of /api: {part.__name__}", part) for part in OLLAMA_PARTS),
            ],
        ),
        "scoring": (
            "Embeddings and scores",
            "Which models make them: [rerank.md](../rerank.md).\n",
            [
                _section("Fields of embeddings", EmbeddingRequest),
                _section("Fields of rerank", RerankRequest),
                _section("Fields of score", ScoreRequest),
                _section("Fields of classify", ClassifyRequest),
                _section("Fields of /v1/decisions", DecisionRequest),
                *(_section(f"Parts of /v1/decisions: {part.__name__}", part) for part in DECISION_PARTS),
            ],
        ),
        "sglang": (
            "SGLang's routes",
            "",
            [
                _section("Fields of /generate", GenerateRequest),
                _section("Fields of sampling_params of /generate", NativeSampling),
                _section("Fields of /open_session", OpenSessionRequest),
                _section("Fields of /close_session", CloseSessionRequest),
                _section("Fields of /tokenize", TokenizeRequest),
                _section("Fields of /detokenize", DetokenizeRequest),
                _section("Fields of /abort_request", AbortRequest),
            ],
        ),
        "files": (
            "Files and batches",
            "[batches.md](../batches.md) is about batches.\n",
            [
                _section("Form fields of POST /v1/files, beside `file`", UploadFields),
                _section("Fields of POST /v1/batches", CreateBatchRequest),
                _section("Parts: OutputExpiresAfter", OutputExpiresAfter),
                _LISTS,
            ],
        ),
        "operator": (
            "Routes for the operator",
            "[weights.md](../weights.md) is about weights that are replaced while the engine serves.\n",
            [
                _section("Fields of /models/load and /models/unload", ModelName),
                _section("Fields of /update_weights_from_disk", UpdateWeightsRequest),
                _section("Fields of /update_weight_version", UpdateVersionRequest),
                _section("Fields of /get_weights_by_name", ReadWeightsRequest),
                _section("Fields of /v1/load_lora_adapter", adapters.LoadLoraRequest),
                _section("Fields of /v1/unload_lora_adapter", adapters.UnloadLoraRequest),
                _section("Fields of /load_lora_adapter", adapters.LoadAdapterRequest),
                _section("Fields of /unload_lora_adapter", adapters.UnloadAdapterRequest),
                _section("Fields of /pause_generation", PauseRequest),
                _section("Fields of /continue_generation", ContinueRequest),
                _section("Fields of /release_memory_occupation and /resume_memory_occupation", MemoryRequest),
                _QUERIES,
            ],
        ),
    }


def _section(title: str, model: type[BaseModel], without: type[BaseModel] | None = None) -> str:
    schema = model.model_json_schema(by_alias=True)
    if "$ref" in schema:  # of a model that holds itself
        schema = schema["$defs"][model.__name__]
    skipped = set(without.model_fields) if without is not None else set()
    required = schema.get("required", ())
    rows = [
        f"| `{name}`{'*' if name in required else ''} | {type_text(field)} | {field.get('description', '')} |"
        for name, field in schema["properties"].items()
        if name not in skipped
    ]
    return "\n".join(
        [f"## {title}", "", "| field (* required) | type and limits | meaning |", "|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    docs = Path(__file__).parents[1] / "docs"
    (docs / "routes").mkdir(exist_ok=True)
    for path, page in reference().items():
        (docs / path).write_text(page, encoding="utf-8")
