"""/tokenize, /detokenize and /tokenizer_info, in the forms of vLLM, SGLang and lm-eval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.prompts import check_ids
from jaxserve.api.generate.rendering import render
from jaxserve.api.http.body import read_body
from jaxserve.api.protocol.answers import Detokenized, Tokenized
from jaxserve.api.protocol.tokens import DetokenizeRequest, TokenizeRequest
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.api.tasks.chat import check_messages, template_messages
from jaxserve.api.tasks.task import ChatMessages
from jaxserve.errors import InvalidValueError

INLINE_TOKENS = 4096

router = APIRouter()


@router.post("/tokenize", **documented(Tokenized, body=TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, of several texts, or of a conversation rendered by the chat template."""
    state = server_state(request)
    body = await read_body(request, TokenizeRequest)
    state.check_model(body.model)
    param, texts, special = await _texts(body, state)
    ids = [await state.encoder.encode(text, add_special_tokens=special, param=param) for text in texts]
    many = isinstance(body.prompt, list)

    def answer() -> Response:
        """Build the answer."""
        content: dict[str, Any] = {
            "tokens": ids if many else ids[0],
            "count": [len(each) for each in ids] if many else len(ids[0]),
            "max_model_len": state.engine.info.max_model_len,
            "token_strs": None,
        }
        if body.return_token_strs:
            strings = [[state.engine.tokenizer.id_to_token(i) or "" for i in each] for each in ids]
            content["token_strs"] = strings if many else strings[0]
        return json_response(content)

    return await _off_loop_if_long(answer, sum(map(len, ids)), state)


async def _off_loop_if_long(work: Callable[[], Response], num_tokens: int, state: ServerState) -> Response:
    """Run long work outside the event loop: reading or writing a token takes up to 0.5 us."""
    return work() if num_tokens <= INLINE_TOKENS else await state.text_work.run(work, num_tokens)


async def _texts(body: TokenizeRequest, state: ServerState) -> tuple[str, list[str], bool]:
    """(the field they are of, texts, whether to add special tokens: by default to plain texts, not to rendered
    conversations)"""
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidValueError("Give prompt or messages, one of them.", param=given[-1] if given else "prompt")
    if body.messages is None:
        text = body.prompt if body.prompt is not None else body.text
        return given[0], [text] if isinstance(text, str) else list(text or []), body.add_special_tokens is not False
    check_messages(body.messages)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    messages = ChatMessages(
        make=template_messages(body.messages, system_in_middle=state.takes_late_system),
        size=body.size,
        tools=tools,
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    return given[0], [await render(messages, state)], bool(body.add_special_tokens)


@router.post("/detokenize", **documented(Detokenized, body=DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids; special tokens are shown unless skip_special_tokens.

    Raises InvalidValueError if the ids are missing.
    """
    state = server_state(request)
    body = await read_body(request, DetokenizeRequest)
    state.check_model(body.model)
    tokens = body.tokens if body.tokens is not None else body.ids
    if tokens is None:
        raise InvalidValueError("tokens is missing.", param="tokens", code="missing_required_parameter")
    many = bool(tokens) and isinstance(tokens[0], list)
    lists: list[list[int]] = tokens if many else [tokens]  # type: ignore[list-item]
    for each in lists:
        check_ids(each, state.engine.info, "tokens" if body.tokens is not None else "ids")
    decode = state.engine.tokenizer.decode

    def answer() -> Response:
        texts = [decode(each, skip_special_tokens=bool(body.skip_special_tokens)) for each in lists]
        text: Any = texts if many else texts[0]
        return json_response({"prompt": text, "text": text})

    return await _off_loop_if_long(answer, sum(map(len, lists)), state)


@router.get("/tokenizer_info", **documented())
async def tokenizer_info(request: Request) -> Response:
    """Return the special tokens and the chat template, so that lm-eval needs no tokenizer of its own."""
    state = server_state(request)
    tokenizer = state.engine.tokenizer
    template = state.chat_template
    return json_response(
        {
            "tokenizer_class": tokenizer.config.get("tokenizer_class"),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": state.engine.info.max_model_len,
            "chat_template": template.source if template is not None else None,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
        }
        | tokenizer.special_tokens_map()
    )
