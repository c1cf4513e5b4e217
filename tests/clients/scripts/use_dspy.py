import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from common import FRANCE, PARIS, PERSON, SCHEMA, URL, check_person, report

model = dspy.LM("openai/demo", api_base=f"{URL}/v1", api_key="none", temperature=0, cache=False, num_retries=0)


def text() -> None:
    [answer] = model(FRANCE)
    assert (answer if isinstance(answer, str) else answer["text"]) == PARIS


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    [answer] = model(PERSON, response_format=wanted)
    check_person(json.loads(answer if isinstance(answer, str) else answer["text"]))


def logprobs() -> None:
    [answer] = model(FRANCE, logprobs=True)
    assert answer["logprobs"].content[0].token == "The"


def embeddings() -> None:
    made = dspy.Embedder("openai/demo", api_base=f"{URL}/v1", api_key="none", caching=False)
    assert made(["a cat", "a dog"]).shape[0] == 2


report("dspy", {"text": text, "JSON schema": schema, "logprobs": logprobs, "embeddings": embeddings})
