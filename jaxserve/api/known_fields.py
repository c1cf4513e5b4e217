"""Say how every known field of a request is handled that the body of its route does not declare: a table for all APIs.

A field of an API, or of another server's version of it, is one of three things:

- served: the route's body declares it (api/*/protocol.py). A field described as "Ignored" has no effect;
- harmless to ignore: it is in `ignored` here. The request means the same without it, so nothing is said. What only
  offers the model something is in `dropped`, and is logged once;
- refused by name: it is in `refused` here, because it would change the meaning of the request. A 400 names it, and
  names our own field if there is one.

Any other field is accepted, has no effect and is logged once. api/http/body.py looks for such fields in each body.
`tests/api/known_fields.txt` lists the fields of the SDKs' types and of other servers; docs/fields.md and
docs/fields_of_others.md show how each is handled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """The reason why a field is refused.

    neutral: values that are accepted because they change nothing, beside null, false and empty values
    objects_only: the field is refused only if its value is an object
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    objects_only: bool = False

    def applies_to(self, value: Any) -> bool:
        is_empty = isinstance(value, str | list | dict) and not value
        if self.objects_only and not isinstance(value, dict):
            return False
        return not (value is None or value is False or is_empty or value in self.neutral)


@dataclass(frozen=True)
class KnownFields:
    """The known fields that a body, or an object in it, does not serve.

    dropped: fields that offer what this server does not run; they have no effect and are logged once
    """

    refused: Mapping[str, Refusal] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()

    def __or__(self, other: KnownFields) -> KnownFields:
        """Return the fields of both. `other` decides if both have a field."""
        refused = {name: each for name, each in self.refused.items() if name not in other.ignored}
        ignored = (self.ignored - other.refused.keys()) | other.ignored
        return KnownFields({**refused, **other.refused}, ignored, self.dropped | other.dropped)


def _refused(reasons: Mapping[str, str], neutral: tuple[Any, ...] = ()) -> KnownFields:
    """Return the refused fields. reasons: maps the names of fields, separated by spaces, to their reason"""
    return KnownFields({name: Refusal(reason, neutral) for names, reason in reasons.items() for name in names.split()})


def _ignored(names: str) -> KnownFields:
    return KnownFields(ignored=frozenset(names.split()))


_TEXT = "the model makes text only"
_ONE_ENGINE = "prefill and decode run in one engine"
_ADAPTER = "name the adapter as model"
_CODE = "serialized code is not accepted"
_READS_TEXT = "the model takes text only"
_SAMPLER = "there is no such sampler; use temperature, top_k, top_p and min_p"
_REPEATS = "use repetition_penalty, frequency_penalty or presence_penalty"
_NO_CONVERSATION = "no conversation is kept here; send all of it, or use /v1/responses or /v1/messages"

# of every route, wherever in the body the sampling stands: SGLang, vLLM, llama.cpp, TGI, Ollama and others
EVERYWHERE = (
    _refused(
        {
            "audio": _TEXT,
            "web_search_options search_parameters enable_search plugins": "hosted tools are not offered",
            "prompt_embeds input_embeds": "tensors from clients are not accepted",
            "chat_template": "a template in a request is not accepted; set model.chat_template on the server",
            "custom_logit_processor logits_processors": _CODE,
            "custom_params": "they are read by custom logit processors, which are not accepted",
            "vllm_xargs": "there are no custom processors to read it",
            "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank": _ONE_ENGINE,
            "ec_transfer_params": "there is no separate encoder",
            "lora_path lora_name lora lora_request adapter_id adapter adapters": _ADAPTER,
            "image_data audio_data video_data mm_processor_kwargs media_io_kwargs images_config video_config "
            "max_dynamic_patch min_dynamic_patch use_audio_in_video multi_modal_data": _READS_TEXT,
            "negative_prompt": "a second prompt is not computed beside the first",
            "samplers": _SAMPLER,
            "grammar_lazy": "a grammar applies from the start; use response_format with type structural_tag",
            "grammar_string gbnf": "use ebnf",
            "banned_strings banned_phrases": "use bad_words",
            "banned_tokens custom_token_bans": "use logit_bias",
            "thread previous_message_id previous_response_id conversation compaction chat_history history": (
                _NO_CONVERSATION
            ),
            "images attachments file_ids data_sources": "there are no files beside the messages and the prompt",
        },
    )
    | _refused(
        {
            "mirostat mirostat_mode xtc_probability dynatemp_range dynamic_temperature smoothing_factor top_a "
            "epsilon_cutoff eta_cutoff penalty_alpha": _SAMPLER,
            "no_repeat_ngram_size dry_multiplier": _REPEATS,
        },
        (0,),
    )
    | _refused({"typical_p typical tfs tfs_z top_n_sigma": _SAMPLER}, (0, 1, -1))
    | _refused({"repeat_penalty encoder_repetition_penalty": _REPEATS}, (1,))
    | _refused({"guidance_scale": "a second prompt is not computed beside the first"}, (0, 1))
    | _refused({"num_beams": "use use_beam_search with n"}, (1,))
    | _refused({"do_sample": "it is always on; temperature 0 is greedy"}, (True,))
    | _ignored(
        # llama.cpp, LM Studio: where and how it is computed
        "cache_prompt id_slot slot_id n_keep n_discard n_indent t_max_predict_ms timings_per_token return_progress "
        "response_fields keep_alive ttl draft_model n_cache_reuse mirostat_tau mirostat_eta dynatemp_exponent "
        "xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers repeat_last_n penalize_nl "
        "repetition_penalty_range grammar_triggers preserved_tokens "
        # routers and clouds
        "provider transforms route models usage trace log_metrics custom_labels no_logs "
        "litellm_metadata litellm_call_id litellm_params extra_headers extra_query timeout "
        "return_bytes"
    )
)

_CONSTRAINTS = (
    "response_format structured_outputs json_schema regex ebnf guided_json guided_regex guided_choice guided_grammar "
    "guided_whitespace_pattern structural_tag grammar format"
)
_OPENAI_CHAT = {
    "max_output_tokens max_new_tokens n_predict num_predict": "use max_tokens",
    "stop_sequences": "use stop",
    "random_seed sampling_seed": "use seed",
    "n_probs top_n_tokens": "use logprobs and top_logprobs",
    "num_ctx": "the context length is the server's, model.max_model_len",
    "options": "options are Ollama's: send its fields at the top, or use /api/chat",
    "guided_whitespace_pattern": "whitespace follows the schema; write it into a regex",
    "structural_tag": "use response_format with type structural_tag",
}

CHAT = (
    KnownFields({"text": Refusal("use response_format and verbosity, or /v1/responses", objects_only=True)})
    | _refused(
        _OPENAI_CHAT
        | {
            "instructions": "use a system message, or /v1/responses",
            "system": "use a system message, or /v1/messages",
            "previous_response_id conversation include": "use /v1/responses, which keeps conversations",
            "output_config output_format": "use response_format and reasoning_effort, or /v1/messages",
            "think": "use thinking, enable_thinking or reasoning_effort",
            "reasoning_budget": "use thinking_token_budget",
            "compaction thread": "use /v1/messages",
            "safe_prompt": "use a system message",
            "suffix": "use /v1/completions",
            "background": "use /v1/responses",
            "best_of": "use n",
            "tool_prompt guideline": "the chat template decides how tools are shown",
        }
    )
    | _ignored(
        # prompts of other routes beside the messages, and what changes nothing here
        "guided_decoding_backend reasoning_format reasoning_in_content parse_tool_calls chat_format "
        "thinking_forced_open incremental_output result_format context_management cache_control betas prompt_mode "
        "deferred safety_settings safety_model search_settings preserve_thinking prompt input"
    )
)

COMPLETIONS = _refused(
    _OPENAI_CHAT
    | {
        "tools tool_choice functions function_call": "use /v1/chat/completions",
        "max_completion_tokens": "use max_tokens",
        "instructions system": "write it into prompt, or use /v1/chat/completions",
        "background include": "use /v1/responses",
        "reasoning_effort reasoning thinking enable_thinking thinking_budget thinking_token_budget think "
        "chat_template_kwargs": "a text prompt has no chat template; use /v1/chat/completions",
        "input_prefix input_suffix input_extra": "use prompt and suffix",
    }
) | _ignored(
    "guided_decoding_backend metadata store service_tier prompt_cache_key safety_identifier messages input text"
)

EMBEDDINGS = _refused(
    {
        "messages": "use input",
        "prompt": "use input",
        "input_type prompt_name task instruction instructions system": (
            "write the model's prompt before the text of input"
        ),
        "embed_dtype output_dtype": "embeddings are float32",
        "embedding_type embedding_types": "embeddings are float32; use encoding_format for base64",
        "endianness": "embeddings are little-endian",
        "late_chunking": "send the chunks as inputs of their own",
        "output_dimension": "use dimensions",
        "truncate": "use truncate_prompt_tokens",
    },
    ("float32", "float", "little", "native", ["float"]),
) | _ignored("encoding extra_body")

RESPONSES = _refused(
    dict.fromkeys(
        ["response_format json_schema", "regex ebnf", "guided_json guided_regex guided_choice guided_grammar"],
        "use text.format or structured_outputs",
    )
    | {
        "grammar format structural_tag": "use text.format or structured_outputs",
        "messages": "use input",
        "max_tokens max_completion_tokens max_new_tokens": "use max_output_tokens",
        "reasoning_effort": "use reasoning.effort",
        "enable_thinking thinking think": "use reasoning.effort, or chat_template_kwargs",
        "thinking_budget thinking_token_budget reasoning_budget": "use /v1/chat/completions",
        "n best_of": "a response has one answer; use /v1/chat/completions",
        "logprobs": "use top_logprobs with include message.output_text.logprobs",
        "functions function_call": "use tools and tool_choice",
        "stop_sequences": "use stop",
        "system": "use instructions",
        "stop_regex bad_words allowed_token_ids": "use /v1/chat/completions",
        "compaction thread": "use /v1/messages",
        "verbosity": "use text.verbosity",
    },
    (1,),
) | _ignored("cache_control betas")
RESPONSES_REASONING = _refused(
    {"mode": "there is one mode of reasoning", "enabled": "use effort", "max_tokens": "use /v1/chat/completions"},
    ("standard", "default", "auto", True),
)

MESSAGES = _refused(
    {
        "compaction": "this server does not summarize conversations; send a request for a summary",
        "response_format": "use output_config.format",
        **dict.fromkeys(_CONSTRAINTS.split()[1:], "use output_config.format, or /v1/chat/completions"),
        "max_completion_tokens max_output_tokens max_new_tokens": "use max_tokens",
        "stop": "use stop_sequences",
        "input": "use messages",
        "instructions": "use system",
        "reasoning_effort": "use output_config.effort",
        "reasoning enable_thinking thinking_budget thinking_token_budget think chat_template_kwargs": "use thinking",
        "n best_of": "a message has one answer; use /v1/chat/completions",
        "seed min_p logit_bias frequency_penalty presence_penalty repetition_penalty stop_regex bad_words "
        "allowed_token_ids min_tokens ignore_eos logprobs top_logprobs": "use /v1/chat/completions",
        "functions function_call": "use tools and tool_choice",
        "previous_response_id conversation": "use thread, or /v1/responses",
        "previous_message_id": "use thread",
    },
    (1,),
) | _ignored(
    # billing, routing and caching
    "metadata service_tier cache_control betas billing_policy context_management diagnostics "
    "fallback_credit_token fallbacks inference_geo speed user_profile_id workspace_id user stream_options"
)
MESSAGES |= KnownFields(dropped=frozenset({"container", "mcp_servers"}))
COUNT_TOKENS = MESSAGES | _ignored("compaction")  # the messages are counted as they were sent
MESSAGES_THINKING = _ignored("block_binding")
MESSAGES_OUTPUT = _ignored("task_budget")  # a hint for the model's planning; max_tokens is the limit

_OLLAMA_MACHINE = (
    "numa num_batch num_gpu num_keep num_thread main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock "
    "embedding_only repeat_last_n penalize_newline draft_num_predict "
    "mirostat mirostat_eta mirostat_tau tfs_z"  # Ollama itself has them no more
)
OLLAMA = _refused(
    {
        "width height steps": "the model makes text only",
        "response_format json_schema structured_outputs guided_json guided_regex guided_choice guided_grammar regex "
        "ebnf grammar": "use format, or /v1/chat/completions",
        "reasoning_effort thinking enable_thinking": "use think",
        "thinking_budget thinking_token_budget": "use /v1/chat/completions",
        "max_tokens max_completion_tokens max_new_tokens": "use options.num_predict",
        "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty repeat_penalty num_predict": (
            "use options"
        ),
        "tool_choice": "a call cannot be required here; use /v1/chat/completions",
        "instructions": "use a system message, or system of /api/generate",
    },
    ("auto", "none"),
)
OLLAMA_CHAT = _refused(
    {
        "system": "use a system message",
        "suffix raw": "use /api/generate",
        "template": "a template in a request is not accepted",
        "context": "send the conversation as messages",
    }
)
OLLAMA_OPTIONS = _refused(
    {
        "grammar": "use format, or /v1/chat/completions",
        "max_tokens": "use num_predict",
        "repetition_penalty": "use repeat_penalty",
        "n": "an answer has one choice; use /v1/chat/completions",
    },
    (1,),
) | _ignored(_OLLAMA_MACHINE)

GENERATE = _refused(
    {
        "parameters": "use sampling_params",
        "instructions system": "write it into text, or use /v1/chat/completions",
        "temperature top_p top_k min_p max_new_tokens max_tokens n stop regex json_schema ebnf seed n_predict "
        "presence_penalty frequency_penalty repetition_penalty": "put it into sampling_params",
        "grammar response_format structured_outputs guided_json guided_regex guided_choice guided_grammar format": (
            "use json_schema, regex, ebnf or structural_tag in sampling_params"
        ),
        "require_reasoning": "use /v1/chat/completions, whose grammars begin after the reasoning",
        "return_prompt_token_ids": "use input_ids, or /v1/completions",
        "positional_embed_overrides": "tensors from clients are not accepted",
        "max_thinking_tokens": "use /v1/chat/completions",
    },
) | _ignored(
    "inputs prompt messages modalities conversation_id routing_key return_entropy external_trace_header received_time"
)
NATIVE_SAMPLING = _refused(
    {
        "max_tokens": "use max_new_tokens",
        "min_tokens": "use min_new_tokens",
        "seed": "use sampling_seed",
        "grammar format response_format structured_outputs guided_json guided_regex guided_choice guided_grammar": (
            "use json_schema, regex, ebnf or structural_tag"
        ),
        "logprobs top_logprobs": "use return_logprob and top_logprobs_num beside sampling_params",
        "beam_width best_of use_beam_search": "use /v1/completions",
        "thinking_budget enable_thinking": "use /v1/chat/completions",
        "stop_sequences": "use stop",
        "bad_words allowed_token_ids": "use logit_bias",
    },
    (1,),
) | _ignored("return_full_text details decoder_input_details")

SCORING = _refused(
    {
        "rank_fields": "write the fields into the document's text",
        "max_chunks_per_doc overlap_tokens": "a document is cut with max_tokens_per_doc",
        "raw_scores": "use use_activation: false",
        "activation softmax": "use use_activation",
        "truncate": "use truncate_prompt_tokens",
        "chat_template_kwargs instruct": "use instruction",
        "items item_first label_token_ids apply_softmax": "this is SGLang's form; use queries and documents",
        "top_k": "use top_n",
        "texts": "use documents",
        "messages": "use query and documents, or input",
    }
) | _ignored("return_text encoding_format")

CHAT_MESSAGE = _refused(
    {
        "prefix partial": "use continue_final_message: true beside messages",
        "images": "images are parts of the content",
        "audio": "the model hears nothing; send the transcript as content",
    }
) | _ignored("annotations reasoning_details cache_control phase id thinking_blocks provider_specific_fields")
CHAT_PART = _ignored("cache_control annotations prompt_cache_breakpoint citations")
CHAT_TOOL = _ignored("cache_control defer_loading allowed_callers eager_input_streaming input_examples")
CHAT_REASONING = _refused({"max_tokens": "use thinking_token_budget"}) | _ignored("exclude summary")
