"""The requests that hold a slot, in two lists: prompts being computed, and decoding requests."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.types.step import Request, RequestStatus


class RunningSet:
    """Requests with a slot, each list in order of admission. Each step, `drop_ended` removes the ended requests."""

    def __init__(self) -> None:
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.has_ended = False  # a listed request no longer runs

    def __bool__(self) -> bool:
        return bool(self.prefilling or self.decoding)

    def __iter__(self) -> Iterator[Request]:
        yield from self.decoding
        yield from self.prefilling

    def drop_ended(self) -> None:
        if self.has_ended:
            running = RequestStatus.RUNNING
            self.decoding = [request for request in self.decoding if request.status is running]
            self.prefilling = [request for request in self.prefilling if request.status is running]
            self.has_ended = False

    def promote(self) -> None:
        """Move requests whose last prompt chunk was scheduled to the decoding ones."""
        done = [request for request in self.prefilling if request.num_inflight_tokens]
        if done:
            self.decoding += done
            self.prefilling = [request for request in self.prefilling if not request.num_inflight_tokens]

    def check_integrity(self) -> list[Request]:
        """Return the running requests. Raises AssertionError if others are listed and `has_ended` does not say so."""
        running = [request for request in self if request.status is RequestStatus.RUNNING]
        assert self.has_ended or len(running) == len(list(self))
        return running

    def best_first(self, *, prompts_only: bool = False) -> list[Request]:
        """Sort the requests to keep first: aged, better priority, more output, shorter prompt.

        prompts_only: return only the requests without output
        """
        running = (request for request in self if request.status is RequestStatus.RUNNING)
        return sorted(
            (request for request in running if not (prompts_only and request.output_token_ids)),
            key=lambda request: (
                not request.aged,
                request.priority,
                -len(request.output_token_ids),
                request.num_prompt_tokens,
            ),
        )
