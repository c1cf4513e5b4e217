"""Why a waiting request waits: for operators, in /server_info and in the log."""

from __future__ import annotations

import enum


class WaitReason(enum.StrEnum):
    """What a request that has no slot waits for. The value is what operators read."""

    GRAMMAR = "its grammar is being compiled"
    ISOLATION = "requests are tried one by one to find the one that makes the device fail"
    ONLINE_FIRST = "it is a batch request, and online requests run first"
    SHARED_PREFIX = "another request computes the prefix that it shares"
    LOADING = "its pages are being loaded from the memory of the host"
    LAST_STEP = "the step that it ran in before it was preempted is not read yet"
    SLOT = "a free slot (scheduler.max_num_seqs)"
    KEY_LIMIT = "other requests of its API key to end (max_running of the key)"
    PAGES = "free KV pages (cache.num_pages)"
    ROOM_BEFORE = "its turn: a request before it in the queue waits for room"
    TOKENS = "its turn: prompts before it take the tokens of a step (scheduler.max_num_batched_tokens)"
