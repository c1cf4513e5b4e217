"""The tables of a store's database, and what makes a database of an earlier version one of this."""

from __future__ import annotations

SCHEMA_VERSION = 4

_FILES_AND_BATCHES = """
CREATE TABLE lease (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL
);
INSERT INTO lease VALUES (1, 0, '');
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    deleted_at INTEGER,             -- hidden from clients; the row stays for a while as a cursor of lists
    stored INTEGER NOT NULL DEFAULT 1,  -- 0: the bytes are gone
    owner TEXT NOT NULL DEFAULT ''  -- the name of an API key; '': the default key
);
CREATE INDEX files_owner ON files (owner);
CREATE INDEX files_expiry ON files (expires_at) WHERE deleted_at IS NULL AND expires_at IS NOT NULL;
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    model TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    errors TEXT NOT NULL DEFAULT '[]',
    metadata TEXT,
    output_expires_seconds INTEGER,
    owner TEXT NOT NULL DEFAULT '',
    CHECK (completed + failed <= total)
);
CREATE INDEX batches_owner ON batches (owner);
CREATE INDEX batches_live ON batches (status) WHERE status IN
    ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE results (
    batch INTEGER NOT NULL REFERENCES batches (seq),
    line INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
"""

# Responses and conversations. A response keeps its own input only; `previous_id` leads to what was before.
_RESPONSES = """
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    ended_at INTEGER,
    background INTEGER NOT NULL,
    logged INTEGER NOT NULL,        -- its events are in response_events
    seen INTEGER NOT NULL DEFAULT 0,  -- a client may have read its events
    previous_id TEXT,
    conversation_id TEXT,
    turns INTEGER NOT NULL,         -- responses in the chain that ends here
    bytes INTEGER NOT NULL,         -- of the items of that chain
    request BLOB,                   -- the body of a background response, until it has ended
    body BLOB NOT NULL              -- the Response object without its output
);
CREATE INDEX responses_previous ON responses (previous_id) WHERE previous_id IS NOT NULL;
CREATE INDEX responses_expiry ON responses (expires_at);
CREATE INDEX responses_live ON responses (status) WHERE status IN ('queued', 'in_progress');
CREATE INDEX responses_logged ON responses (ended_at) WHERE logged;
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of the conversation
    holder TEXT NOT NULL,           -- id of the response or conversation
    side TEXT NOT NULL,             -- input or output of a response; item of a conversation
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX items_holder ON items (holder, side);
CREATE INDEX items_id ON items (id);
CREATE TABLE response_events (
    response_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
);
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    bytes INTEGER NOT NULL          -- of its items
);
"""

# Threads of Messages. Only the latest reply of a thread can be continued; the ids of the earlier ones tell why not.
_THREADS = """
CREATE TABLE threads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    last_id TEXT NOT NULL UNIQUE,   -- id of its latest reply
    owner TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,         -- of the head and the turns
    head BLOB NOT NULL              -- JSON of what later requests leave out: system and tools
);
CREATE INDEX threads_owner ON threads (owner, expires_at, bytes);
CREATE INDEX threads_expiry ON threads (expires_at);
CREATE TABLE thread_turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of the conversation
    id TEXT NOT NULL UNIQUE,        -- of its reply
    thread INTEGER NOT NULL REFERENCES threads (seq) ON DELETE CASCADE,
    body BLOB NOT NULL              -- JSON list of its messages, the reply last
);
CREATE INDEX thread_turns_thread ON thread_turns (thread);
"""

SCHEMA = _FILES_AND_BATCHES + _RESPONSES + _THREADS

# What makes a database of this version one of the next.
MIGRATIONS = {
    1: """
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX files_owner ON files (owner);
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX batches_owner ON batches (owner);
ALTER TABLE idempotency RENAME TO idempotency_1;
CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    response BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
INSERT INTO idempotency SELECT '', key, fingerprint, response, created_at FROM idempotency_1;
DROP TABLE idempotency_1;
""",
    2: _RESPONSES,
    3: _THREADS,
}
