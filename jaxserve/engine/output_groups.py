"""Groups the outputs of batch requests, because no client reads them token by token.

One message per step and batch request would cost the API process more than online requests do. Knows TokenOutputs
only.
"""

from __future__ import annotations

from jaxserve.types.extras import TokenExtras
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest
from jaxserve.types.step import FIRST_VERSION, TokenOutput, joined_versions

# after a crash of this process, a new engine computes at most so many tokens of a batch request again
GROUP_TOKENS = 64


class OutputGroups:
    """Holds back the outputs of watched requests, except the first and the last of each."""

    def __init__(self) -> None:
        self._held: dict[str, TokenOutput | None] = {}  # None: no output yet

    def __len__(self) -> int:
        """Number of watched requests."""
        return len(self._held)

    def watch(self, request: EngineRequest) -> None:
        """Group the outputs of a batch request. Not with stop strings, which are found by the API process."""
        params = request.params
        if params.grouped and request.priority >= BACKGROUND_PRIORITY and not (params.stop or params.stop_regex):
            self._held[request.request_id] = None

    def take(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Return what must be sent now. Held tokens are sent with the output that follows them."""
        if not self._held:
            return outputs
        return [ready for output in outputs if (ready := self._join(output)) is not None]

    def _join(self, output: TokenOutput) -> TokenOutput | None:
        request_id = output.request_id
        if request_id not in self._held:
            return output
        before = self._held[request_id]
        if before is not None:
            _prepend(before, output)
        if output.finish_reason is not None:
            del self._held[request_id]
            return output
        if before is None or len(output.token_ids) >= GROUP_TOKENS:
            self._held[request_id] = TokenOutput(request_id=request_id)
            return output
        self._held[request_id] = output
        return None


def _prepend(before: TokenOutput, output: TokenOutput) -> None:
    """Prepend the held tokens of the same request to `output`."""
    if before.weight_versions or output.weight_versions:
        made = [each.weight_versions or (FIRST_VERSION,) for each in (before, output) if each.is_made]
        output.weight_versions = joined_versions(*made)
    output.token_ids = before.token_ids + output.token_ids
    if before.logprobs is not None:
        output.logprobs = before.logprobs + (output.logprobs or [])
    output.prompt_logprobs = before.prompt_logprobs or output.prompt_logprobs
    output.extras = TokenExtras.joined([before.extras, output.extras])
    output.num_accepted_drafts += before.num_accepted_drafts
    output.num_rejected_drafts += before.num_rejected_drafts
