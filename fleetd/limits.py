"""Every bound in one place, each with its reason.

A number here is tested at the limit and one past it. Units are in the names.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# ---- HTTP ------------------------------------------------------------------------------------------------
# Agent transcripts with inlined files reach tens of megabytes; above that it is a mistake or an attack.
HTTP_BODY_BYTES = 64 * MIB
# aiohttp has no read deadlines of its own: a header trickled a byte at a time would hold a socket for ever.
HTTP_HEADERS_S = 10.0
HTTP_BODY_STALL_S = 30.0
# A byte just inside every stall deadline would hold a socket for days; a whole body also has to average this.
HTTP_BODY_BYTES_PER_S = 16 * KIB
# A reader that takes nothing for this long keeps a slot and its KV cache from others.
HTTP_WRITE_STALL_S = 60.0
HTTP_KEEPALIVE_IDLE_S = 75.0
HTTP_CONNECTIONS = 256
HTTP_CONNECTIONS_UNAUTHENTICATED = 32
# SSE comments while nothing else is sent: agents give up after 10 s of silence in the worst case.
SSE_KEEPALIVE_S = 4.0
# Progress comments faster than this only cost the reader time.
SSE_PROGRESS_S = 0.1
# How long a streaming request waits for the worker to accept it, so that an early refusal still gets its own
# HTTP status. Headers must be out within 50 ms of a request.
HEADERS_GRACE_S = 0.03

# ---- Requests --------------------------------------------------------------------------------------------
MESSAGES = 4096
STOP_STRINGS = 16
STOP_STRING_CHARS = 1024
CHOICES = 8
TOP_LOGPROBS = 20
TOOLS = 256
QUEUED_REQUESTS = 64
# Answers one /v1/completions body may ask for: its prompts times n.
COMPLETIONS_PER_REQUEST = 64
# Jinja renders in the worker: a template that has produced nothing for this long never will.
RENDER_S = 30.0
RENDERED_CHARS = 64 * MIB

# ---- Engine protocol -------------------------------------------------------------------------------------
# One frame carries at most one request; a request is at most one HTTP body.
ENGINE_FRAME_BYTES = HTTP_BODY_BYTES + MIB
# A worker reports progress at least this often while it has work; twice missed is a stall worth reporting,
# and ENGINE_STALL_S of silence ends it. One prefill chunk on a slow CPU takes about a second.
ENGINE_BEAT_S = 1.0
ENGINE_STALL_S = 60.0
# An engine that has work but has not taken a step for this long makes /health say "stalled".
ENGINE_STALL_REPORT_S = 10.0
ENGINE_LOAD_S = 900.0
ENGINE_STOP_S = 5.0
# Events the daemon holds for one slow HTTP reader before it stops reading that request's stream.
EVENTS_QUEUED = 4096

# ---- Model files -----------------------------------------------------------------------------------------
SAFETENSORS_HEADER_BYTES = 100 * MIB  # the format's own bound
MODEL_JSON_BYTES = 64 * MIB  # tokenizer.json of a 256k vocabulary is 35 MB
MODEL_TENSORS = 1_000_000
TENSOR_DIMS = 8

# ---- Daemon ----------------------------------------------------------------------------------------------
DRAIN_S = 30.0
# sun_path: 104 bytes on macOS, 108 on Linux, one of them for the terminating NUL. The smaller one everywhere,
# so that a home which works on one machine works on the other.
SOCKET_PATH_BYTES = 103
# Ledger writes held while the disk is slow; past this they are dropped: no answer waits for a statistic.
STORE_QUEUED = 1024
# How long a request waits for its ledger row before it goes on without knowing.
LEDGER_WAIT_S = 0.25
# Telling the same trouble again within this time helps nobody.
REPEAT_LOG_S = 60.0
# After a second signal, or when streams do not end after the drain.
STOP_S = 2.0
# Label values per metric: one series per model, and a client can name models freely.
METRIC_MODELS = 64

# ---- GGUF files ------------------------------------------------------------------------------------------
# Metadata of a 262k vocabulary with merges and scores is about 20 MB.
GGUF_HEADER_BYTES = 256 * MIB
GGUF_KEYS = 65_536
GGUF_ARRAY_ITEMS = 8_000_000
GGUF_TENSORS = 65_536

# ---- fleetctl --------------------------------------------------------------------------------------------
# A healthy daemon answers control calls in milliseconds; a swapped-out one may need seconds.
CLIENT_CALL_S = 10.0
# Streams carry a comment every SSE_KEEPALIVE_S; this much silence means the daemon is stuck, not slow.
CLIENT_STREAM_STALL_S = 60.0
# Hashing or reading every byte of the largest model from a slow disk.
CLIENT_LONG_CALL_S = ENGINE_LOAD_S + 60.0

# ---- Models on disk and on their way ---------------------------------------------------------------------
MODEL_CONFIG_BYTES = 4 * MIB
MODEL_FILES = 10_000  # entries in one model folder, at any depth
MODEL_NAME_CHARS = 200
# Up to this size a model is hashed again at every load: half a second buys certainty. Above it only when a
# file's size, time or inode changed, or when asked.
MODEL_REHASH_BYTES = 2 * GIB
# Free space that a download must leave, so that logs and the ledger can still be written.
DISK_RESERVE_BYTES = 256 * MIB
# A download reports at least once a second; this much silence means its process hangs.
PULL_SILENCE_S = 60.0
PULL_LINE_BYTES = 64 * KIB
# No new byte from the source for this long ends a download; it can be resumed.
PULL_STALL_S = 120.0
