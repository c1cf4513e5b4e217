"""Fields that SGLang and vLLM add to a choice on request: ids, counts, candidates. OpenAI's answer has none of them.

All of them are sent with the choice's last chunk.
"""

from __future__ import annotations

from typing import Any

from jaxserve.api.generate.generation import PromptTask
from jaxserve.api.respond.extras import Candidates, RoutedExperts
from jaxserve.api.tasks.task import ExtraFields
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.step import FIRST_VERSION, joined_versions


class ExtraFieldWriter:
    """The extra fields of one request. For most requests `wanted` is False, and nothing else here is called.

    scoring: the engine's token is dropped, see CompletionOptions
    """

    def __init__(self, fields: ExtraFields, request_id: str, *, scoring: bool = False) -> None:
        self._fields = fields
        self._scoring = scoring
        self._request_id = request_id
        self._output_ids: dict[tuple[int, int], list[int]] = {}
        self._candidates: dict[tuple[int, int], Candidates] = {}
        self._experts: dict[tuple[int, int], RoutedExperts] = {}
        self._versions: dict[tuple[int, int], tuple[str, ...]] = {}
        self.wanted = fields != ExtraFields()

    def note(self, number: int, output: RequestOutput) -> None:
        """Collect the tokens of an output of prompt `number`."""
        key = number, output.index
        self._output_ids.setdefault(key, []).extend([] if self._scoring else output.token_ids)
        if output.weight_versions:
            self._versions[key] = joined_versions(self._versions.get(key, ()), output.weight_versions)
        if self._fields.sampling_mask:
            self._candidates_of(key).note(output)
        if self._fields.experts_from is not None:
            self._experts.setdefault(key, RoutedExperts()).note(output)

    def _candidates_of(self, key: tuple[int, int]) -> Candidates:
        if key not in self._candidates:
            self._candidates[key] = Candidates(self._fields.sampling_mode)
        return self._candidates[key]

    def finish(self, number: int, prompt: PromptTask, output: RequestOutput) -> dict[str, Any]:
        """Return the fields for the last chunk of a choice."""
        extras: dict[str, Any] = {}
        if self._fields.meta_info or self._fields.sampling_mask:
            extras["meta_info"] = self._meta_info(number, prompt, output)
        if self._fields.weight_versions:
            extras["weight_versions"] = self._labels(number, output)
        sglext = self._sglext(number, prompt, output)
        return extras | {"sglext": sglext} if sglext else extras

    def _meta_info(self, number: int, prompt: PromptTask, output: RequestOutput) -> dict[str, Any]:
        meta = {
            "id": self._request_id,
            "prompt_tokens": len(prompt.prompt_token_ids),
            "completion_tokens": len(self._output_ids.get((number, output.index), ())),
            "cached_tokens": output.num_cached_tokens,
            "weight_version": self._labels(number, output)[-1],
        }
        candidates = self._candidates.get((number, output.index))
        return meta if candidates is None else meta | candidates.as_dict()

    def _labels(self, number: int, output: RequestOutput) -> list[str]:
        return list(self._versions.get((number, output.index), ()) or (FIRST_VERSION,))

    def _sglext(self, number: int, prompt: PromptTask, output: RequestOutput) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._fields.cached_tokens:
            found["cached_tokens_details"] = {"device": output.num_cached_tokens, "host": 0}
        if self._fields.spec_tokens:
            found["spec_tokens_details"] = None  # drafts are counted for a whole request, in usage
        if self._fields.experts_from is not None:
            experts = self._experts[number, output.index]
            found["routed_experts"] = experts.encoded(self._fields.experts_from, len(prompt.prompt_token_ids))
        if self._fields.input_ids:
            found["input_ids"] = prompt.prompt_token_ids
        if self._fields.output_ids:
            found["output_ids"] = self._output_ids.get((number, output.index), [])
        return found
