"""List the ranges of the fields of a request: one table for every route, which the OpenAPI document shows.

Each name is a type with its range. Limits that depend on the model (vocabulary, context) are checked in
api/generate/task.py and api/generate/planner.py.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.types.sampling import MAX_LOGIT_BIAS

MAX_CHOICES = 128
MAX_TOOLS = 1024  # OpenAI accepts 128; agents with several MCP servers send more, and vLLM has no limit
MAX_LOGPROBS = 20
MAX_STOPS = 32
MAX_STOP_CHARS = 4096  # characters of all stop strings of a request; preparing so many takes 4 ms
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096  # also the limit on parts of a message: checking 20,000 would block the event loop for 0.3 s
MAX_DOCUMENTS = 1024
MAX_GRAMMAR_CHOICES = 4096  # texts of guided_choice
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_NATIVE_TOKENS = 128

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
AdditivePenalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
LengthPenalty = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
LogitBias = Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
LogprobsCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenCountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
PromptStart = Annotated[int, Field(ge=-1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(max_length=2**20)]
WatchedIds = Annotated[list[TokenId], Field(max_length=128)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Rank = Annotated[int, Field(ge=0, le=63)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(max_length=MAX_STOPS)]
StopPattern = Annotated[str, Field(min_length=1, max_length=256)]
StopPatterns = Annotated[list[StopPattern], Field(max_length=MAX_STOPS)]
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
CacheSalt = Annotated[str, Field(min_length=1, max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
