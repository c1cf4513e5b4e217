import asyncio

import cohere
from common import FRANCE, PARIS, URL, report

DOCUMENTS = ["Bananas are yellow.", PARIS, "The cat sleeps."]


def check_ranked(results: list) -> None:
    scores = [each.relevance_score for each in results]
    assert len(results) == 2 and scores == sorted(scores, reverse=True), results
    assert all(0 <= each.index < 3 for each in results), results


def rerank() -> None:
    request = {"model": "demo", "query": FRANCE, "documents": DOCUMENTS, "top_n": 2}
    check_ranked(cohere.ClientV2(api_key="none", base_url=URL).rerank(**request, max_tokens_per_doc=64).results)
    found = cohere.Client(api_key="none", base_url=URL).rerank(**request, return_documents=True)
    check_ranked(found.results)
    assert all(each.document.text == DOCUMENTS[each.index] for each in found.results), found

    async def run() -> list:
        return (await cohere.AsyncClientV2(api_key="none", base_url=URL).rerank(**request)).results

    check_ranked(asyncio.run(run()))


report("cohere", {"rerank": rerank})
