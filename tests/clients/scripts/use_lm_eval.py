from common import FRANCE, PARIS, URL, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

GREEDY = {"until": [], "max_gen_toks": 20, "temperature": 0}


def instance(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def text() -> None:
    """A chat, as tasks that generate send it."""
    model = LocalChatCompletion(model="demo", base_url=f"{URL}/v1/chat/completions", max_retries=1)
    prompt = model.apply_chat_template([{"role": "user", "content": FRANCE}])
    [answer] = model.generate_until([instance("generate_until", prompt, GREEDY)])
    assert answer == PARIS


def logprobs() -> None:
    """The likelihood of a continuation, as multiple-choice tasks read it; the server's own tokenizer over HTTP."""
    model = LocalCompletionsAPI(
        model="demo", base_url=f"{URL}/v1/completions", tokenizer_backend="remote", batch_size=2, max_retries=1
    )
    choices = [
        instance("loglikelihood", "Once upon a time", choice) for choice in (" there was a cat.", " Paris Paris.")
    ]
    (right, _), (wrong, _) = model.loglikelihood(choices)
    assert wrong < right < 0, (right, wrong)


report("lm_eval", {"text": text, "logprobs": logprobs}, name="lm-eval")
