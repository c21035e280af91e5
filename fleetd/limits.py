"""Every bound in one place, each with its reason.

A number here is tested at the limit and one past it. Units are in the names.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# ---- File descriptors ------------------------------------------------------------------------------------
# What a process asks for: macOS gives no more, whatever its hard limit says.
DESCRIPTORS = 10_240
# Kept from connections: the database, workers and their streams, model files, listeners, libraries.
DESCRIPTORS_RESERVED = 96

# ---- Hardware --------------------------------------------------------------------------------------------
# MLX and a GPU's driver start within seconds, even on a machine that is busy; what failed is asked again
# after so long: a driver may come up after the daemon, as /dev/nvidia-uvm does.
DEVICE_ASK_S, DEVICE_RETRY_S = 30.0, 60.0
# Other programs use a card's memory, too: its free bytes are asked for again after this long.
CARD_MEMORY_S = 1.0
# Of a system that does not even tell how much memory it has: the least that Macs with Apple silicon have.
ASSUMED_MEMORY_BYTES = 8 * GIB
# Linux is short of memory where programs wait for it this share of the time, and less than this is free.
STALLED_PERCENT = 10.0
WARNING_FREE_SHARE, CRITICAL_FREE_SHARE = 0.10, 0.05
# Models that are to stay loaded, and the file with their names: far more than fit in any memory.
PINNED_MODELS, PINNED_MODELS_BYTES = 64, 64 * KIB
# What is noted of the weights of a drafter that was pulled: a SHA-256 for each of its files.
PULLED_DRAFTER_BYTES = 64 * KIB
# While the system is short of memory, models that were idle for this long are unloaded; all idle ones where
# it is critically short, one after the other: freed memory shows after a moment.
PRESSURE_IDLE_S, PRESSURE_STEP_S = 60.0, 3.0
# MLX keeps freed buffers for reuse, by default all that the machine has: at most this part of its memory,
# which is 512 MiB of 8 GiB. One chunk of a prompt needs less; after it they are freed in any case.
MLX_CACHE_PART = 16
# The prefix cache's share of the memory that a model leaves: old prompts must not starve new ones.
PREFIX_SHARE = 0.25

# ---- Images ----------------------------------------------------------------------------------------------
# Of one conversation: agents that look at screenshots send some dozens.
IMAGES = 64
IMAGE_BYTES = 20 * MIB
# A camera's picture has 12 to 50 million pixels; decoded, each takes three bytes and some for the reader.
IMAGE_PIXELS = 64 * 1024 * 1024

# ---- HTTP ------------------------------------------------------------------------------------------------
# Agent transcripts with inlined files reach tens of megabytes; above that it is a mistake or an attack.
HTTP_BODY_BYTES = 64 * MIB
# Of the request line or one header: what aiohttp takes by default. Agents send a few hundred bytes; a browser
# sends the cookies of all programs on this host.
HTTP_HEADER_BYTES = 8190
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
# From the connection on, before others may push it out: who opens many at once sends the tokens soon, on a
# busy machine within seconds.
HTTP_TOKEN_S = 5.0
# SSE comments while nothing else is sent: agents give up after 10 s of silence in the worst case.
SSE_KEEPALIVE_S = 4.0
# Progress comments faster than this only cost the reader time.
SSE_PROGRESS_S = 0.1
# Objects that only say that an answer is on its way, for clients that do not count comments.
STREAM_PROGRESS_S = 1.0
# How long a streaming request waits for a loaded worker to tokenize its prompt, so that an early refusal
# still gets its own HTTP status: only then is its length known. Where others may help with the prompt, it
# waits until that is decided.
HEADERS_GRACE_S = 1.0
# The same for the plan, which a slow disk may hold up: it is known after LEDGER_WAIT_S at the latest.
HEADERS_PLAN_S = 0.5

# ---- Answers that are kept -------------------------------------------------------------------------------
# Since its last use. A tool loop comes back within minutes; somebody who reads an answer, within the hour.
RESPONSE_KEPT_S = 3600.0
# A day of an agent that works all the time has some thousand; with it the table is some MB.
RESPONSES_KEPT = 4096
# As JSON; Python's objects have two to three times as much, and those of a conversation are shared. Some
# hundred answers of an agent with its long prompts, which sends them whole.
RESPONSES_KEPT_BYTES = 64 * MIB
# Of a list of items, as OpenAI has it: at most, and where the client does not say.
ITEMS_LISTED, ITEMS_LISTED_BY_DEFAULT = 100, 20

# ---- The page --------------------------------------------------------------------------------------------
# From `fleetctl open` to a browser that has started.
PAGE_TICKET_S = 30.0
PAGE_TICKETS = 8
# Unused: a working day. Browsers of one person; the oldest gives way.
PAGE_SESSION_S = 12 * 3600.0
PAGE_SESSIONS = 16
# How often a listener's state is compared with what it knows. With SUSPECT_S, a machine that is gone is seen
# within 3 s.
EVENTS_S = 0.25
# Open pages, several tabs of each; one costs some thousandths of a core.
EVENT_LISTENERS = 32
# Ended requests that are told to listeners: as many as could end between two looks.
EVENT_TRACES = 64

# ---- Requests --------------------------------------------------------------------------------------------
MESSAGES = 4096
STOP_STRINGS = 16
STOP_STRING_CHARS = 1024
# As other servers have it. Choices beyond those that run at once wait for a turn, so that one request takes
# no more streams and memory than a few clients do.
CHOICES = 128
CHOICES_AT_ONCE = 8
TOP_LOGPROBS = 20
TOOLS = 256
# Marks of a client in one prompt, after which its next requests go on: as many as Anthropic's API has.
CACHE_MARKS = 4
# Free-form JSON (tools, arguments, template options): schemas nest a dozen deep, and a template's own code
# recurses with what it is given.
JSON_DEPTH = 64
# The same in a conversation, with what is around it.
CONVERSATION_DEPTH = JSON_DEPTH + 16
QUEUED_REQUESTS = 64
# Ours have 34; this one is written into logs and the ledger.
REQUEST_ID_CHARS = 128
# Answers one /v1/completions body may ask for: its prompts times n.
COMPLETIONS_PER_REQUEST = 128
# Jinja renders in the worker: a template that has produced nothing for this long never will.
RENDER_S = 30.0
RENDERED_CHARS = 64 * MIB
# A request that is rendered and tokenized in some 10 ms: those that are larger do not hold it up meanwhile.
SHORT_PROMPT_BYTES = 32 * KIB
# Memory beside the model's own that a template may take, and the code that builds a model from its config.
RENDER_BYTES = GIB
# Where more is left after a template than the text of a large agent's prompt takes, its garbage refers to
# itself and is collected, in some 50 ms.
RENDER_LEFT_BYTES = 64 * MIB
BUILD_BYTES = 4 * GIB
# If no address-space limit holds such code, how often the daemon looks at its memory: a template that
# grows as fast as memory is copied has some hundred MiB more by then.
WORKER_MEMORY_S = 0.1

# ---- Engine protocol -------------------------------------------------------------------------------------
# One frame carries at most one request; a request is at most one HTTP body.
ENGINE_FRAME_BYTES = HTTP_BODY_BYTES + MIB
# A worker reports progress at least this often while it has work; twice missed is a stall worth reporting,
# and ENGINE_STALL_S of silence ends it. One prefill chunk on a slow CPU takes about a second.
ENGINE_BEAT_S = 1.0
ENGINE_STALL_S = 60.0
# MLX compiles kernels for CUDA when they are first used: one took 50 s on an H100's host (docs/platforms.md),
# and may take several times as long on a small one.
ENGINE_COMPILE_S = 600.0
# An engine that has work but has not taken a step for this long makes /health say "stalled".
ENGINE_STALL_REPORT_S = 10.0
# The pool looks for stalled and idle workers, and for a lack of memory, so often.
POOL_CHECK_S = 1.0
# A stage of a load that says nothing more, though it computes.
ENGINE_LOAD_S = 900.0
# A load that reads nothing, takes no memory and does not compute for so long never will: a disk spins up in
# less. Where loads are slow, this factor times what one takes.
LOAD_STALL_S, LOAD_LATE = 60.0, 8.0
ENGINE_STOP_S = 5.0
# From SIGKILL to the end of a process; one that waits for a disk that is gone may never end.
ENGINE_KILL_S = 30.0
# Measuring a model's speed on a CPU: cuts between machines are only as good as this, and a slow core needs as
# long to see its largest chunk twice. With 0.5 s two machines that had just loaded a model cut their first
# prompt four to one instead of in half.
CALIBRATE_S = 3.0
# The same on a GPU, where it also decides how prompts are cut: a large model needs seconds for its large
# chunks. It is kept for later loads.
CALIBRATE_GPU_S = 10.0
# A worker whose figures are in doubt and that was idle for so long is measured again; after each attempt that
# was in doubt too, it waits twice as long.
CALIBRATE_AGAIN_S = 20.0
CALIBRATE_AGAIN_MOST_S = 3600.0
# The same of a search for a scoring profile that found no memory.
SEARCH_AGAIN_S, SEARCH_AGAIN_MOST_S = CALIBRATE_AGAIN_S, CALIBRATE_AGAIN_MOST_S
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
# The same trouble is logged once within this time.
REPEAT_LOG_S = 60.0
# Kinds of refused requests that are logged within it: a client that tries addresses would fill the log.
REFUSALS_LOGGED = 32
# Failed requests that are logged within it: each has its code and its request in the traces as well.
FAILURES_LOGGED = 32
# After a second signal, or when streams do not end after the drain.
STOP_S = 2.0
# A background task that failed is started again after so long, and after each further failure later.
RESTART_S = 1.0
RESTART_MOST_S = 30.0
# Label values per metric: one series per model, and a client can name models freely.
METRIC_MODELS = 64

# ---- GGUF files ------------------------------------------------------------------------------------------
# Metadata of a 262k vocabulary with merges and scores is about 20 MB.
GGUF_HEADER_BYTES = 256 * MIB
GGUF_KEYS = 65_536
GGUF_ARRAY_ITEMS = 8_000_000
GGUF_TENSORS = 65_536
# Of one piece of a SentencePiece vocabulary; published ones end at some 60.
GGUF_PIECE_CHARS = 256
# One for each pair of a head's dimensions; they are written to the config.
GGUF_ROPE_FACTORS = 4096
# Weights that are converted at a time: 16 MiB as f32, some ten times that while they are fitted.
GGUF_SLICE_WEIGHTS = 4 * MIB
# An imported model may be this much larger than its file, else a smaller width is taken where there is one.
GGUF_GROWTH = 1.25

# ---- Fleet: identity and roster --------------------------------------------------------------------------
# fleetd's own certificates take 350 bytes.
CERTIFICATE_BYTES = KIB
# A process of its own makes a new home's key in 0.2 s, on a machine that is overloaded in many; past this the
# daemon does it itself.
NEW_IDENTITY_S = 30.0
# What people read in a table of machines; a longer host name is cut.
MEMBER_NAME_CHARS = 64
# Machines that one machine keeps a session with. Fleets are owned by people, who own a dozen.
ROSTER_MEMBERS = 64
# One by each machine about each machine of a fleet of thirty, all confirmed everywhere; its gossip is 0.5 MB.
ROSTER_RECORDS = 1024
# Machines that the word of one member adds here at once, and then in a day. A machine that joins a fleet
# hears of a dozen at once; a member that invents machines has to wait.
ROSTER_ADDED_PER_DAY = 16
# Records over that bound are tried again this often: the bound lets one more in after 90 minutes.
ROSTER_LATE_S = 600.0
# Records of one member that are merged as they come; more of them wait for the next tick.
ROSTER_MERGES_AT_ONCE = 64
ROSTER_MERGES_PER_S = 4.0
# Each costs a signature check of a tenth of a millisecond or more.
ROSTER_RECORDS_PER_TICK = 128
# So many records at their longest, which is 1.5 KiB, and room.
ROSTER_FILE_BYTES = 4 * MIB

# ---- Fleet: pairing --------------------------------------------------------------------------------------
# An attacker who guesses has a chance of 3 in 2^32; a person mistypes a code once, not three times.
PAIRING_TRIES = 3
PAIRING_WINDOW_S = 300.0
# Looking on the network for the machine that shows a code.
PAIRING_SEARCH_S = 15.0
# Connections to an open window that have not tried the code: one is the right one, the others cost memory.
# The right one needs its place for two round trips and two point multiplications.
PAIRING_CONNECTIONS = 8
PAIRING_CONNECTIONS_PER_ADDRESS = 4
# A hello with its certificate takes half a kilobyte; records travel in as many messages as they need.
PAIRING_FRAME_BYTES = 16 * KIB
# From one message of the other program to its next; the slowest step is two point multiplications in Python.
PAIRING_STEP_S = 10.0
# For the person at the inviting machine to compare the phrase and answer.
PAIRING_ANSWER_S = 300.0

# ---- Fleet: the peer port --------------------------------------------------------------------------------
# Static peers one configuration may name: as many as a fleet may have members.
MEMBERS_CONFIGURED = 64
# Sockets that have not shown who they are: enough for every member to dial at once, little for a flood.
PEER_SOCKETS_UNKNOWN = 32
# Of these from one address, so that one stranger cannot take all of them.
PEER_SOCKETS_PER_ADDRESS = 12
# From accept to a finished TLS handshake, a ticket, or the start of pairing.
PEER_HANDSHAKE_S = 5.0
PEER_CONNECT_S = 5.0
# A closed connection waits this long for the other side to agree that it is.
PEER_SHUTDOWN_S = 1.0
# Bytes handed to a session's transport before the kernel took the earlier ones: a ping queues behind these.
PEER_WRITE_BUFFER_BYTES = 64 * KIB
# How long a session that another one replaced stays open for what was begun on it meanwhile.
RETIRE_S = 1.0
# A machine that stops takes its mDNS records back within this time, or leaves them to expire.
GOODBYE_S = 0.5
# Sessions with one machine: two that called each other at once, one over a better way, one that died unheard.
SESSIONS_PER_PEER = 4
# Requests of one peer that run here at once: one peer alone cannot fill the queue.
PEER_REQUESTS = QUEUED_REQUESTS // 2

# ---- Fleet: who is called, and what is told --------------------------------------------------------------
# Two addresses of one machine side by side: the first may belong to an interface that leads nowhere.
DIALS_PER_PEER = 2
# Connections being made at once, over all machines.
DIALS_AT_ONCE = 8
# Of these to addresses that were only claimed: a flood of claims must not keep members from each other.
DIALS_TO_HINTS = 6
# Fits into one frame of a session with room to spare.
ROSTER_BATCH_BYTES = 48 * KIB
ADDRESSES_TOLD = 128
# Members times addresses, written with room to spare.
ADDRESS_FILE_BYTES = 256 * KIB
# A thousand machines, and only a person's own word adds one.
PROMPT_RULES_BYTES = 64 * KIB
# A card is repeated this often, so that three lost ones (which TCP does not lose) do not expire it.
CARD_REPEAT_S = 20.0

# Every way to a peer is measured again after this long, and one measurement takes at most so long.
LINK_PROBE_S = 600.0
LINK_PROBE_WITHIN_S = 10.0
# Measurements answered at once, one per machine: each holds a thread, and everything that touches the disk
# needs one of five or more.
LINK_PROBES = 2

# ---- Fleet: jobs on other machines -----------------------------------------------------------------------
# Machines tried for one request before its first token; a fourth would only make a broken fleet feel slow.
ATTEMPTS = 3
# A machine that computes or waits says so this often, and one that has said nothing for so long is given up.
JOB_ALIVE_S = 2.0
JOB_SILENCE_S = 8.0
# What another machine may take over an answer without getting further: until it has accepted it where its
# card says that it is idle and has the model; where it is busy; and then for each step. A slow core prefills
# ten tokens of a small model in a second.
JOB_BEGIN_S = 60.0
JOB_QUEUE_S = 300.0
JOB_STALL_S = 60.0
JOB_LEAST_TOK_S = 10.0
# However steadily it goes on: a prefill may take JOB_QUEUE_S more than that, and an answer as much beside its
# tokens at this rate. The slowest machine that was measured decodes fifty times as fast.
JOB_DECODE_TOK_S = 0.25
# And so much for each image: the largest encoder's 6e12 operations take two slow cores a minute or two.
JOB_IMAGE_S = 300.0
# And so much before it accepts, for each image to be sent and decoded.
JOB_IMAGE_BEGIN_S = 5.0
# And not longer than this factor times the plan's own figure for the prefill, on top of a step's.
JOB_LATE = 8.0
# A request that its client cancelled counts against a machine that had sent nothing for so long, on top of
# that factor times what was planned.
JOB_CANCELLED_S = 10.0
# Requests that a machine gets at once before it has completed the first one, or the first after a failure:
# whatever it claims, it costs no more than these.
ANSWERS_ON_TRIAL = 2
# Seconds of an answer that are not computing, and tokens with which a speed can be told from them.
ANSWER_OVERHEAD_S = 1.0
ANSWER_SPEED_TOKENS = 256
# The same of a part of an answer if more than this share of its time went by while its client read what had
# come: a slow client would make the machine look slow. Up to it a figure is a third too slow at most.
ANSWER_CLIENT_SHARE = 0.25
# A machine that asked for an answer and reads none of it keeps a slot and its KV cache from others.
JOB_READ_STALL_S = 60.0
# What an answer from another machine may come to. Tokens: beyond the longest context there is. The longest
# tokens of vocabularies are runs of 128 spaces. Arguments of all tool calls of one answer, in characters.
ANSWER_TOKENS = 1 << 21
TOKEN_CHARS = 1024
TOOL_ARGUMENT_CHARS = 8 * MIB
# Of a token's text and its bytes, on average over the logprobs of an answer: twice the longest ones.
LOGPROB_CHARS = 512
# A prompt has at most so many tokens for each byte that was sent, as letters that are taken apart have; and
# these, which a chat template adds.
PROMPT_TOKENS_PER_BYTE, TEMPLATE_TOKENS = 16, 65_536
# One event: the arguments of a tool call, or an echoed prompt.
JOB_EVENT_BYTES = 4 * TOOL_ARGUMENT_CHARS + MIB
# Tokens whose text is held back, as a tool call's is, before they are told without it.
UNTOLD_TOKENS = 32
# What the text of an answer may cost: characters that are looked at per character that came. A grammar holds
# back a marker, some thirty characters, and looks at it again with each token; ten times that is a fault.
LOOKS_PER_CHAR = 512
# Longest text before a call's arguments, or before the text of a channel: a name, an id and what is around.
ANSWER_HEAD_CHARS = 1024
# Of a thought behind the marker that ends an empty one, which an answer waits for: more would be noticed.
LATE_THOUGHT_CHARS = 256
# Of a tool's name as a model writes it, with a namespace or a number around it.
TOOL_NAME_CHARS = 512
# How deep a call's arguments nest as JSON; what is deeper comes as text. With what is around them in a
# conversation, a model can be given them back.
ARGUMENTS_DEPTH = JSON_DEPTH - 16
# Parts of a schema that are looked at to choose between readings of one value: clients write schemas, and a
# few lines of one that refers to itself can mean millions of parts.
SCHEMA_STEPS = 10_000
# Of a schema or a grammar that an answer is held to. The largest that clients send describe whole APIs.
CONSTRAINT_CHARS = 1 << 20
# Texts of which an answer has to be one: as many as a large set of labels.
CONSTRAINT_CHOICES = 4096
# Of a schema that an answer is held to: its subschemas, and how deep its JSON nests. OpenAI takes 5,000
# properties, ten deep; with what references are written out for, both stay far from the library's own bounds.
SCHEMA_PARTS, SCHEMA_DEPTH = 5_000, JSON_DEPTH
# Steps of what allOf, and keywords beside anyOf or a reference, have in common, and of showing that the
# options of oneOf have nothing in common: two tenths of a second. References that follow each other directly.
SCHEMA_COMBINATIONS, SCHEMA_REFERENCES_IN_A_ROW = 100_000, 16
# Values of all enums of a schema, and characters of one of them: a mask takes a millisecond per 4,000.
SCHEMA_VALUES, SCHEMA_VALUE_CHARS = 10_000, 4_096
# Properties of one object that may be left out, over all alternatives at one place: each is a state of the
# parser at once, of which its rows hold 2,000; and all properties of one object.
SCHEMA_OPTIONAL, SCHEMA_PROPERTIES = 256, 2_000
# Optional properties of which at least one has to be written: the library writes out each choice.
SCHEMA_AT_LEAST_ONE = 32
# minItems and maxItems, which the library writes out; minLength and maxLength, which it counts.
SCHEMA_ITEMS, SCHEMA_STRING_CHARS = 10_000, 1_000_000
# Of all patterns of a schema: their text, which takes 3 µs a character to read. Of one: the characters that
# its repeats stand for.
SCHEMA_PATTERN_CHARS, SCHEMA_PATTERN_SIZE = 32_768, 100_000
# Patterns of one string at once, by allOf: their automata are multiplied.
SCHEMA_PATTERNS_AT_ONCE = 4
# multipleOf, without its decimal point: the automaton has a state for each remainder, and 10,000 take 65 ms.
# Digits behind the point.
SCHEMA_MULTIPLE, SCHEMA_MULTIPLE_DECIMALS = 10_000, 9
# Of a compiled grammar: a state of the parser in a row, a lexer's states (2 kB each), and its symbols.
GRAMMAR_ROW_ITEMS, GRAMMAR_LEXER_STATES, GRAMMAR_SYMBOLS = 2_000, 30_000, 200_000
# Rules that refer to each other: the library recurses with them, and 4,000 end 8 MiB of stack.
GRAMMAR_RULE_DEPTH = 500
# Its building, 50,000 units a millisecond; one mask of the lexer, 14,000 units a millisecond; one of the
# parser, 20,000 a millisecond.
GRAMMAR_LEXER_FUEL, GRAMMAR_STEP_FUEL, GRAMMAR_STEP_ITEMS = 1_000_000, 200_000, 50_000
# Of a forced text that is drafted: it is made whole at each step, which holds up all answers.
GRAMMAR_FORCED_BYTES = 2_048
# What the repeats of an expression that a client wrote stand for together, and a text to choose from: what is
# forced is made whole at each step, and a thousand characters take a millisecond.
GRAMMAR_REPEATS = 4_096
# Operators & and ~ of a grammar that a client wrote: twenty patterns joined by & took 4 s and 234 MB.
GRAMMAR_OPERATORS = 8
# Of the library's own words about a grammar that is malformed.
GRAMMAR_ERROR_CHARS = 200
# Digits of a bound behind the decimal point, and the largest whole number of one: what doubles tell apart.
SCHEMA_DECIMALS, SCHEMA_LARGEST = 15, 2**53
# A load or a download tells its progress so often at most.
LOADING_EVENTS = 100_000
# Of a job's id, as the machine that asked for it has it, to be found again here.
JOB_ID_CHARS = 64
# What the machine that answered writes down of a job follows its last event: helpers' own accounts come
# within two seconds, or not at all. Its steps, planned or measured, are a dozen for each machine; at their
# longest they fill this.
JOB_TRACE_S = 3.0
JOB_TRACE_STEPS = 64
JOB_TRACE_BYTES = 64 * KIB
# Names and hashes of a model's files are on record where it was installed, or were hashed for the card.
COPY_OFFER_S = 30.0
# A copy that is slower than the slowest Wi-Fi, after some time to begin, comes from elsewhere.
COPY_GRACE_S = 60.0
COPY_LEAST_BYTES_PER_S = 32 * KIB
# Copies given to others at once, a process each; more would only make all of them slower.
COPIES_GIVEN = 8
# What other machines may do with the models here at once, all together and each; and how often one may ask:
# a page that is opened asks twice, and a person cannot click faster.
MANAGED, MANAGED_PER_PEER = 16, 4
MANAGE_BURST, MANAGE_PER_S = 60, 1.0
# A list of all models with their remarks: the catalog has 30 KiB, and a folder of models as much again.
MODELS_MESSAGE_BYTES = MIB
# A clock is asked for by `fleetctl doctor`, which is waiting.
CLOCK_WITHIN_S = 2.0
# What another machine's clock may show: a thousand years.
CLOCK_UNIX_S = 2.0**36

# ---- Checkpoints: states at earlier tokens of a prompt, for models that cannot take tokens back -----------
# Tokens between the last two: what is computed again beside the tokens that changed.
CHECKPOINT_BLOCK_TOKENS = 256
# The last two blocks, then at doubling distances: without borders eight reach back 32,000 tokens.
CHECKPOINTS_PER_PROMPT = 8
# So many of them at borders of messages and at clients' marks. Two are at the last ends of blocks, where the
# disk has them, and from where another machine's are checked. The others are for edits in mid-conversation.
CHECKPOINTS_AT_BORDERS = 4
# A border so few tokens behind another place has none of its own: to read these again takes no longer than to
# stop there.
CHECKPOINT_APART_TOKENS = 32
# One prompt's take at most this part of the prefix cache: a large model's state may be 150 MB.
CHECKPOINT_SHARE = 4

# ---- Fleet: shared prefill -------------------------------------------------------------------------------
# Sending states at earlier tokens, for prompts that go on from there, may make a shared prefill longer by
# this share; where links are slower, fewer are sent: the later ones, as a conversation is edited at its end.
SHARE_STATES_SHARE = 0.05
# Machines that share one prompt, the one that answers included: each one more costs a chunk of waiting.
SHARE_MACHINES = 4
# Layers of a model: several times the deepest one there is.
LAYERS = 4096
# Blocks of prompts whose machine is remembered, over all machines and models: a hundred long conversations.
AFFINITY_BLOCKS = 65_536
# Sessions of clients whose last machine is remembered.
SESSIONS = 4096
# Of a session's id, as its client sends it.
SESSION_CHARS = 512
# Prompts with fewer new tokens than this are never shared: agreeing takes longer than computing them.
SHARE_LEAST_TOKENS = 256
# A prompt waits for another one's beginning only if that has at least so many tokens more than the cache:
# less is computed in one step.
FOLLOW_LEAST_TOKENS = 64
# From the tokenized prompt to the agreement of all helpers, whose models are loaded; then it stays local.
SHARE_SETUP_S = 2.0
# A helper whose model takes longer to load is not asked now: it may load it for later prompts.
SHARE_COLD_S = 2.0
# A helper is given up when it is later than this factor times the plan's own figure, and this on top of it.
SHARE_LATE, SHARE_GRACE_S = 2.0, 2.0
# Prompts of others that one machine helps with at once: each holds KV, and they slow each other.
ASSISTS = 2
# Of a group of machines that hold one model: rows of one step, tokens of one chunk of a prompt, what a member
# keeps under numbers of their own, changes of that in one message, and the message.
GROUP_STREAMS, GROUP_TOKENS, GROUP_HELD, GROUP_CHANGES = 64, 8192, 4096, 4096
GROUP_MESSAGE_BYTES = 256 * KIB
# Layers of a machine whose hidden states a block of tokens may ask for besides those that come out.
GROUP_TAPS = 16
# Blocks of a prompt that a group keeps on disks: 32 bytes each in a message. Members look between chunks of
# other prompts what they have of it, and are waited for no longer than this.
GROUP_KEPT_BLOCKS, GROUP_LOOKUP_S = 2048, 5.0
# A group must have room for the keys and values of so many tokens, and takes no more than for so many prompts
# of the model's whole context.
GROUP_LEAST_TOKENS, GROUP_STREAM_CONTEXTS = 2048, 2
# If layers have running states, a machine of a group has memory for one per so many tokens: of common models,
# a state takes about as much as the rows of so many tokens would.
GROUP_STATE_TOKENS = 1024
# Machines that a request may name to hold its model together: as many as a cut is looked for over.
PLACEMENT_MACHINES = 8
# A worker whose stream to a member ended waits so long for what the member's machine says of it.
MEMBER_TELLS_S = 1.0
# So often an answer is begun if machines of its group leave.
GROUP_TRIES = 3
# Others may need so long to free what they held for the group that has ended.
GROUP_AGAIN_S = 15.0
# A group that no request has used for so long may be cut anew, by what its machines were measured to take.
# The next time may come no sooner than after this pause, which doubles each time.
GROUP_RECUT_IDLE_S, GROUP_RECUT_S, GROUP_RECUT_MOST_S = 30.0, 600.0, 86_400.0
# Groups that one worker has layers for; each has memory of its own.
GROUPS = 2
# Chunks of prompts that are on their way through a member before the machine that answers computes the next.
GROUP_FRAMES = 3
# Times the largest chunk that may wait at a member: those, the next one, and blocks of answers.
GROUP_AHEAD = GROUP_FRAMES + 2
# A member shows so often that its process runs, and one that is silent for so long is lost. One that computes
# a step for so long is lost, too; its own daemon ends it before.
GROUP_BEAT_S, GROUP_SILENT_S, GROUP_STEP_S = 0.5, 2.5, 300.0
# A member that says that it is alive, and gets no further with its layers for so long, is lost, or for
# LOAD_LATE times what their load takes, if that is longer. Its own daemon ends a load that stands still.
GROUP_LOAD_S = 300.0
# Members open streams to each other within this; else hidden states pass through the machine that answers.
# After such a stream has broken in use, these members get none for so long.
GROUP_LINK_S, GROUP_RELAY_S = 5.0, 600.0
# Ranks of a ring have so long to find each other, and so long to read their weights.
RING_FORM_S, RANKS_LOAD_S = 45.0, 1800.0
# Once all of them have, so long to meet, make a first pass and measure a sum; kernels may be compiled for it.
RANKS_MEET_S = 120.0
# What a rank tells the others before RDMA connects them: addresses of some queues.
SIDE_CHANNEL_BYTES = 1 << 20
# A pass of ranks is late after so many times what such passes took, and not before so many seconds; a first
# one, before any was measured, only after the third figure.
RANK_STALL_PASSES, RANK_STALL_S, RANK_FIRST_S = 20.0, 2.0, 60.0
# One that makes no pass and is silent for so long is stopped: its loop says every second that it turns.
RANK_SILENT_S = 5.0
# Passes up to so many tokens take about as long as one of a single token.
RANK_SHORT_TOKENS = 16
# A rank is looked at so often; one that is to end has so long for it, and is killed then.
RANK_LOOK_S, RANK_END_S = 0.1, 2.0
# Sums of ranks are checked again after so many passes: one sum more beside two for each layer of each pass.
RANK_CANARY_PASSES = 16
# Ranks of one group.
RANKS = 16
# Of the room that a rank's weights leave, so much is for keys and values.
RANK_ROWS_SHARE = 0.75
# Bytes that wait to be sent on one stream before its sender computes no further.
SHARE_QUEUED_BYTES = 64 * MIB
# One message of an agreement: 8 bytes for each of 4096 layers, a dozen versions, and room.
SHARE_MESSAGE_BYTES = 64 * KIB
# Steps that are told of one prefill: two per layer of the deepest model.
SHARE_STEPS = 512
# A machine that failed is left out for this long, doubled by each further failure up to the second figure.
BACKOFF_S, BACKOFF_MOST_S = 30.0, 960.0
# Failures of one machine that concern one model each, by kind of work: more models than a person asks for in
# a quarter of an hour. The one that is longest ago is forgotten.
BACKOFF_MODELS = 64
# One that says, for the second time in a row, that it cannot do what its card says: doubled likewise, but no
# longer than BACKOFF_S for what passes by itself: too many requests, no memory, a stop.
BACKOFF_REFUSED_S = 1.0
# The same helper is not asked again to load the same model within this time.
SHARE_WARM_S = 60.0
# A model that could not be loaded to help others is not tried again within this time.
SHARE_LOAD_AGAIN_S = 600.0
# Requests of which it is kept where they ran, what was planned and what came of it: some days of a busy
# person's, some 2 MB.
TRACES = 500
# Other ways of computing a prompt that one of these remembers.
TRACE_LOSERS = 8
# Stages of one load that are listed: the engine has six, a download names each of its files.
LOAD_STAGES = 48
# Phases of a request: waiting, loading, reading, writing, and again after each attempt that fails.
TRACE_PHASES = 64
# Steps of a request that are kept.
TRACE_STEPS = 256
# Machines times models whose measured speeds correct their own figures.
SPEED_CORRECTIONS = 256
# New tokens that are computed here as well, while waiting, to see that a helper computes the same.
SHARE_SPOT_TOKENS = 16
# Of the last ones that came, which rest on all before them, so many are always checked: few, because it comes
# at the end, where nothing else is waited for.
SHARE_END_TOKENS = 8
# The part of a prefill's time that the check of later tokens may take, which comes at its end.
SHARE_LATER_SHARE = 0.01
# How far such a row may be from ours, as a part of its length, in three tokens of four. bf16 deep in
# a model is some per cent off, more where near ties send a token to another expert; other weights, all of it.
SHARE_SPOT_RELATIVE = 0.25
# A turn of shared work goes on with further chunks until it has taken this long: a chunk through one layer is
# too little to look at everything else in between.
SHARE_STEP_S = 0.1
# A client that leaves while others help with its prompt may only have had too short a time-out. Half way,
# nothing can be kept of a prompt that is cut by tokens. So it is read on for one that asks again within this
# time, if this machine has nothing else to do.
SHARE_LEFT_S = 60.0
# Prompts that were shared in vain, of which nothing could be kept: a worker reads the last so many alone at
# the next try, since that can be kept half way.
SHARE_LOST_PROMPTS = 16
# Of so many of other machines' prompts a helper may keep rows, and a machine notes so many of a model.
SHARE_WARM_PROMPTS = 16
# A helper that hears nothing for this long gives up what it helps with. Only a last resort: who it helps, or
# a broken connection, says so much earlier.
SHARE_IDLE_S = 60.0

# ---- Speculation -----------------------------------------------------------------------------------------
# Tokens of one pass: on every device measured, passes cost more than they bring well before that.
SPEC_WIDTH = 16
# Of a longer text only the last so many tokens are searched for drafts: 64 bytes of lookup, 640 of automaton
# for each, and old text is seldom what comes next.
SPEC_INDEX_TOKENS = 32_768
# Of these, taken up between two passes: about 5 ms of Python.
SPEC_INDEX_STEP = 1024
# Hidden states of the newest tokens that are kept for a source which drafts from them, the prompt's included.
SPEC_HIDDEN_ROWS = 256
# The probe at load, of a model whose pace it does not know yet.
SPEC_PROBE_S = 0.5
# The same where kernels are chosen by size: no further context is probed after this long, and blocks are not
# used beyond those that were.
SPEC_PROBE_KERNELS_S = 10.0
# A finding on the disk: what it rests on, some dozen variables of the environment among it, and 16 widths or
# heads.
FINDING_BYTES = 64 * KIB
# The index of a library's modules: over three thousand of them, with the names that they define.
INDEX_BYTES = 4 * MIB

# ---- Fleet: drafts from another worker -------------------------------------------------------------------
# Texts that one worker drafts for at once: each holds KV, and they slow each other.
FOLLOWS = 4
# Tokens that a drafter is ahead of the text at most: two blocks of verification and what a slow link holds.
DRAFT_AHEAD = 32
# The longest text that is drafted for; what a drafter's model sees of it: so many of its first tokens, and at
# least half as many as this of its last ones.
DRAFT_TEXT_TOKENS = 1 << 20
DRAFT_SINK_TOKENS, DRAFT_WINDOW_TOKENS = 64, 2048
# What is drafted for mistakes: how many of the likeliest ones, and how far after each.
DRAFT_DETOURS, DRAFT_DETOUR_TOKENS = 4, 6
# Bounds of one message: paths in it, and tokens of a path.
DRAFT_BRANCHES, DRAFT_BRANCH_TOKENS = 16, 64
# Paths that the machine that answers keeps; all that can still fit the text are fewer.
DRAFT_PATHS = 64
# Messages of drafts that came and were not looked at yet. A drafter sends fewer than this for one commit and
# then waits for the next; more are a flood.
DRAFT_WAITING = 256
# Commits whose hashes are remembered, for drafts that were under way meanwhile.
DRAFT_BASES = 256
# A drafter that hears nothing for this long lets go of the text; a long prompt may be prefilled meanwhile.
DRAFT_IDLE_S = 600.0
# How long a machine that has loaded the drafter may take to offer it, whatever it says meanwhile. Others are
# asked then, so no longer than an answer of some hundred tokens takes.
DRAFT_OFFER_S = 10.0

# ---- Smart prefill ---------------------------------------------------------------------------------------
# Machines that score one prompt side by side: each repeats the prompt's head and the question.
SMART_SCORERS = 4
# A scorer that computes its segment in several passes, because that is sooner, scores at least so many tokens
# in each: a pass of fewer has more around it and less to compare.
SMART_PASS_TOKENS = 4096
# Scoring is not waited for much longer than planned: this factor times the plan's figure, and this on top.
SMART_LATE, SMART_GRACE_S = 3.0, 10.0
# A request for scores is a text of at most one HTTP body; scores are about 120 bytes per token.
SMART_SCORES_BYTES = 64 * MIB
# Heads that are asked what a question attends to. Those that find it are few; each costs keys and products.
SCORE_HEADS = 16
# The question's last tokens whose queries count: the smart prefill papers take 8 to 64.
SCORE_QUERIES = 64
# Idle time that a worker is given at once to be measured for scoring; the daemon renews it every second
# while nothing runs, and takes it back when something does. Larger models are measured only once a prompt has
# wanted their scores: a model that only answers need not be.
IDLE_TIME_S, IDLE_MODEL_BYTES = 3.0, 4 * GIB
# Prompts that one worker scores at once, each a step in its turn; more are refused, and read whole where no
# other machine scores them.
SCORES = 4
# Prompts of others that one machine scores at once: each holds a layer's keys for all of its tokens.
SMART_SERVED = 2
# Prompts whose scores are remembered: a client's choices and its repetitions ask for the same.
SMART_REMEMBERED = 16
# Conversations whose shortening is remembered for their next turn, and kept ranges in all: about 16 MB.
SMART_HISTORIES = 256
SMART_HISTORY_RANGES = 100_000

# ---- Vectors and reranking -------------------------------------------------------------------------------
# Characters of one text: no model here reads more of any language, and a tokenizer takes a hundred times as
# much memory.
VECTOR_TEXT_CHARS = MIB
# Tokens of one text, whatever the model's files say: an encoder cannot be stopped in the middle of a text,
# and what it takes of memory while it reads has to stay within what every load leaves free.
VECTOR_TEXT_TOKENS = 8192
# Seconds that one pass may take, about, before a cancel, another request or a chat has its turn; and the
# fewest and the most tokens of one, whatever a machine's pace.
VECTOR_PASS_S = 0.1
VECTOR_PASS_TOKENS = (64, 8192)
# While a chat's prompt is read on the same machine, the next pass begins so long after the last one: a
# twentieth of the time. A pass that is under way when the prompt begins is held up for as long, at most.
VECTOR_YIELD_S = 1.0
# Tokens by which a load measures the pace.
VECTOR_MEASURED_TOKENS = 512
# How much a worker for vectors yields to others on the same cores: to one that answers, all but a tenth. That
# is among all processes of a machine: with less of its cores a search would stand still beside other work.
VECTOR_NICE = 10

# ---- Fleet: vectors over machines ------------------------------------------------------------------------
# Texts of one request: at 1,024 numbers each, their vectors are 40 MB, and 200 MB as JSON.
VECTOR_REQUEST_TEXTS = 10_000
# Requests at work at once, here, and those that wait for a turn: programs ask for each text of a document in
# a request of its own, for all of them at once.
VECTOR_JOBS, VECTOR_JOBS_WAITING = 64, 1024
# Characters, or token ids, of all of them; a single request may always have as many as a body holds.
VECTOR_HELD_CHARS = 256 * MIB
# Requests of at most so many texts go before the parts of larger ones: a person waits for them.
VECTOR_URGENT_TEXTS = 16
# What a machine is given at once: short enough that machines end together, and that little is lost with one.
VECTOR_PART_S = 0.5
# Texts of one part, so of one message to a worker and of one answer.
VECTOR_PART_TEXTS = 256
# Beside a chat, a machine gets parts of so little, and rests so many times as long as each has taken.
VECTOR_CHAT_PART_S = 0.05
VECTOR_REST = 9.0
# An answer that is later than planned by this, besides a factor of the plan, is waited for no longer.
VECTOR_GRACE_S = 20.0
# One message of vectors: a part of wide ones is 256 x 16,384 numbers of four bytes.
VECTOR_ANSWER_BYTES = 20 * MIB
# Parts of other machines that one machine computes at once, and those that it is given by one of them: so
# many short texts share a pass.
VECTOR_PARTS_SERVED, VECTOR_PARTS_GIVEN = 16, 8
# Jobs that clients send in several requests: so many are known between two of these.
VECTOR_LONG_JOBS = 64
# Texts of one request of `fleetctl embed`, which grows while requests take less than this.
VECTOR_CLI_TEXTS, VECTOR_CLI_S = 1024, 5.0

# ---- Fleet: control sessions -----------------------------------------------------------------------------
# A host name has at most this many characters.
PEER_NAME_CHARS = 255
# Sentences of an error that crosses the wire, each; longer ones are cut.
ERROR_TEXT_CHARS = 1024
# One-way news is not fragmented; the longest is a capability card.
NOTIFY_BYTES = 64 * KIB
# One-way news has no credit: what one machine may send of it. A whole roster comes at once with a new
# session; after that a card of 30 KiB, four times a second at most.
NEWS_BURST_BYTES = 4 * MIB
NEWS_BYTES_PER_S = 512 * KIB
# What each costs besides its bytes.
NEWS_COST_BYTES = 256
# Names of methods and topics: ours are words.
METHOD_CHARS = 64
# The longest frame: such news and what is around it.
FRAME_BYTES = NOTIFY_BYTES + KIB
# A ping waits for at most the fragment that is being written, so fragments are short; two of them, with what
# is around them, fill one write.
FRAGMENT_BYTES = 32 * KIB - 64
# What a fragment costs besides its bytes, so that a flood of empty messages runs out of credit too.
FRAGMENT_COST_BYTES = 64
# A request up to this size travels in the Open frame; those are sent in the order of their streams, before
# other traffic of the same urgency, so they must be short.
OPEN_BODY_BYTES = 8 * KIB
# Credit per direction of a stream: 1 GB/s at a round trip of 0.25 ms.
STREAM_WINDOW_BYTES = 256 * KIB
# A routed request is at most one HTTP body.
MESSAGE_BYTES = HTTP_BODY_BYTES + MIB
# Messages of one session, unfinished or waiting for their readers: one that arrives while another is read.
SESSION_HELD_BYTES = 2 * MESSAGE_BYTES
# The same on the way out.
SESSION_QUEUED_BYTES = 2 * MESSAGE_BYTES
# Open at once, opened by one side.
SESSION_STREAMS = 256
# Answers (Pong, Cancel, Window) waiting for a peer that asks and does not read.
SESSION_ANSWERS = 4096
# New requests, cancellations and pings of one session at once, and each second after that: each costs a tenth
# of a millisecond or more, and none has credit. Ours come by the dozen.
SESSION_ASKS_AT_ONCE = 4096
SESSION_ASKS_PER_S = 1024
# From the end of the TLS handshake.
HELLO_S = 5.0
# Silence after which a ping asks whether the other side is there.
PING_S = 1.0
# Silence after which it is not to be relied on: within 3 s of its death, with one late answer forgiven.
SUSPECT_S = 2.5
# Silence after which it is gone.
DEAD_S = 5.0
# Under constant traffic nothing is silent, but the round trip is wanted.
RTT_PING_S = 5.0
# A peer that talks without answering is no use either: a minute of it under constant traffic.
PINGS_UNANSWERED = 12

# ---- Fleet: cards ----------------------------------------------------------------------------------------
# A hundred models with everything known about them take about 30 KiB.
CARD_BYTES = 64 * KIB
CARD_MODELS = 256
# No name, version or revision is longer; a file name on any of the platforms is at most 255 bytes.
CARD_TEXT_CHARS = 255
# A model whose files could not be read to hash them is tried again after so long, then twice as long each
# time: hashing may read hundreds of gigabytes.
DIGEST_AGAIN_S, DIGEST_AGAIN_MOST_S = 30.0, 3600.0
# Cards are sent again well before this; a machine whose pings go on but whose cards do not is not believed.
CARD_TTL_S = 60.0

# ---- Fleet: control over the Unix socket ------------------------------------------------------------------
# A machine, a code or an address in a control request; the longest is a host name and a port.
CONTROL_TEXT_CHARS = 300

# ---- Log -------------------------------------------------------------------------------------------------
# If a file is the log, so much of it is kept twice: months of a quiet daemon.
LOG_FILE_BYTES = 8 * MIB

# ---- Power -----------------------------------------------------------------------------------------------
# A command that keeps the machine awake ends at once when it is told to.
POWER_COMMAND_S = 2.0
# What it says where it is refused.
POWER_WORDS_BYTES = 512
# If the system refuses to be kept awake, it is asked again so often.
POWER_AGAIN_S = 300.0

# ---- Waking other machines -------------------------------------------------------------------------------
# Hardware addresses on a card: a desktop has Ethernet twice and Wi-Fi.
WAKE_ADDRESSES = 4
# What waking takes until it was seen: a Mac or a PC that sleeps needs 5 to 20 s until its network answers.
WAKE_S = 20.0
# A machine is waited for no longer than this factor times what it took before, and a figure is no larger than
# this.
WAKE_LATE, WAKE_MOST_S = 2.0, 120.0
# The packet is sent again so often meanwhile: broadcasts get lost.
WAKE_REPEAT_S = 1.0
# After a machine was woken, and after it did not wake: twice as long after each further failure.
WAKE_AGAIN_S, WAKE_FAILED_S, WAKE_FAILED_MOST_S = 60.0, 300.0, 86_400.0

# ---- Fleet: sealed streams ------------------------------------------------------------------------------
# Fits the second-level cache of a core together with its ciphertext: measured a third faster than 1 or 4 MiB
# on x86, and still few enough tags and calls to cost nothing.
SEALED_CHUNK_BYTES = 512 * KIB
# Not one byte in this time: a disk that spins up or a Wi-Fi that roams is back, a machine that left is not.
SEALED_STALL_S = 20.0
# Who takes bytes keeps a thread or a process meanwhile: as slow as this it is not let, as in a copy.
SEALED_GRACE_S, SEALED_LEAST_BYTES_PER_S = COPY_GRACE_S, COPY_LEAST_BYTES_PER_S
# From the message that carries a ticket to the connection that shows it, over a slow link to a busy peer.
TICKET_S = 10.0
# Streams about to be opened at once, over all peers.
TICKETS = 64
# A message of a few numbers: an invitation with its ticket and key, a clock.
SMALL_MESSAGE_BYTES = KIB
# A message between processes: the names of a model's files and how much of each is there.
HANDOFF_BYTES = MIB
# The other process reads as soon as it has started, imports included.
HANDOFF_S = 10.0
# Files of one model in a copy: a million million parameters at 16 bits in shards of 5 GB are 400.
COPY_FILES = 1024
# Machines whose link would need longer for the layers of a model fetch none.
PART_FETCH_S = 3600.0
# An offer or an order names them all, with hashes.
COPY_MESSAGE_BYTES = 512 * COPY_FILES
# All of them together; four times as much.
COPY_BYTES = 8192 * GIB

# ---- Fleet: ways to a machine ----------------------------------------------------------------------------
# A machine with Ethernet, Wi-Fi, a Thunderbolt bridge and a tailnet has eight, counting both IP versions.
ADDRESSES_PER_PEER = 16
# The wait after the first failure, doubled by each further one: a machine that is down costs six tries a
# minute, and one that nothing announces is called within ten seconds of being back.
DIAL_AGAIN_S = 0.5
DIAL_AGAIN_MOST_S = 10.0
# Measurements kept per address: half a minute of pings, and the last transfers.
LINK_ROUND_TRIPS = 32
LINK_SPEEDS = 16
# Less than this measures the round trip and TCP's start, not the way.
LINK_TRANSFER_BYTES = MIB
# Other work, another cable or another room may have changed an older figure. Measuring one again takes some
# 17 MB.
LINK_SPEED_S = 3600.0

# ---- Fleet: discovery ------------------------------------------------------------------------------------
# Machines remembered from mDNS: as many as a fleet may have members, and a flood cannot fill the memory.
DISCOVERED_PEERS = 64
# Claims acted upon, each of which may lead to dials; at once, those of a whole fleet that is switched on.
CLAIMS_PER_S = 20
CLAIMS_AT_ONCE = 128
# The longest string that a TXT record can hold.
CLAIM_TEXT_BYTES = 255
# How often the network is asked for machines; one is forgotten after three questions without an answer.
DISCOVERY_ASK_S = 60.0
DISCOVERED_TTL_S = 200.0
# A new cable or another Wi-Fi is noticed within this time.
DISCOVERY_REFRESH_S = 5.0
# Where multicast does not work: tried again, less and less often.
DISCOVERY_AGAIN_S = 1.0
DISCOVERY_AGAIN_MOST_S = 60.0
# mDNS about fleetd that is parsed: sixty-four machines describing themselves are 32 KiB.
MDNS_BYTES_PER_S = 128 * KIB
MDNS_BURST_BYTES = 512 * KIB
# What this machine multicasts comes back to it within a millisecond, or never.
MULTICAST_ECHO_S = 0.5
# A question of doctor to the system or to a port, while a person waits.
PROBE_S = 2.0

# ---- Keys and values on the disk --------------------------------------------------------------------------
# Tokens of one block: few enough that an edited prompt keeps nearly all before the edit and little is left to
# compute behind the last whole block, and a megabyte or more even with a small model, which a disk reads as
# fast as it can.
CACHE_BLOCK_TOKENS = 128
# Most blocks in the index, at some 250 bytes each: 32 GiB in blocks of half a megabyte.
CACHE_BLOCKS = 65_536
# Most beginnings of texts in the index, at some 200 bytes each; 512 characters apart, they cover 30 million.
CACHE_BEGINNINGS = 65_536
# Of the disk that is free, unless the settings say otherwise.
CACHE_QUOTA_SHARE, CACHE_QUOTA_BYTES = 0.1, 32 * GIB
# Bounds of one block's header, of its payload, and of the buffers in that: keys and values of each head of
# the deepest model, and a state of a layer in half a gigabyte.
CACHE_HEADER_BYTES, CACHE_BLOCK_BYTES, CACHE_BLOCK_PARTS = MIB, 512 * MIB, 65_536
CACHE_LAYOUT_CHARS = 128
# Of a prompt with blocks or snapshots: far beyond the longest context there is.
CACHE_TOKENS = 1 << 31
# Labels of the machines that a block came from, and of what its rows rest on: a conversation that more
# machines had a part in is kept in memory only.
CACHE_ORIGINS, CACHE_ORIGIN_CHARS = 16, 16
# Labels that a worker remembers to have forgotten: one for each lie of a machine, or machine that left, and
# prompts that began before it run for some hours.
FORGOTTEN_ORIGINS = 1024
# A block that is being written for longer than this has lost its writer.
CACHE_WRITING_S = 600.0
# A disk that refused a block is not asked again within this time.
CACHE_AGAIN_S = 60.0
# The part of the writer's thread's time that it works while the worker computes: it shares memory, and on a
# CPU the cores, with the computation.
CACHE_WRITE_SHARE = 0.1
# What is queued is written until a worker must end; less than ENGINE_STOP_S, after which it is killed.
CACHE_FLUSH_S = 3.0
# A prompt waits this long to hear what the disk has of it, and this long for each block.
CACHE_LOOKUP_S, CACHE_BLOCK_S = 0.25, 5.0
# Assumed before they are measured: a slow disk, and a slow prefill.
CACHE_READ_BYTES_PER_S, CACHE_TOKEN_S = 200 * MIB, 0.005
# What a restore takes besides its bytes.
CACHE_RESTORE_FIXED_S = 0.01
# Bytes of a prompt's files that the system is asked for, to know how many lie in memory: within a twentieth,
# in less than a millisecond.
CACHE_PROBES = 32
# Less than this measures how a file is opened, not how fast a disk is.
CACHE_SPEED_BYTES = MIB

# ---- Keys and values of other machines --------------------------------------------------------------------
# Names of blocks in one question: a prompt of a million tokens.
FETCH_BLOCKS = 8192
FETCH_MESSAGE_BYTES = 40 * FETCH_BLOCKS + 64 * KIB
# Machines that are asked at once what they have of a prompt, and how long for. A prompt waits for the answer.
FETCH_ASKED, FETCH_FIND_S = 8, 0.5
# How long the answer waits for blocks that are being written, most of the time for which a prompt waits for
# it, and how often the disk is looked at meanwhile.
FETCH_WRITING_S, FETCH_WRITING_POLL_S = 0.3, 0.03
# Prompts whose blocks may be being written, as a daemon remembers them: those of the last minutes.
KEPT_LATELY = 64
# Beginnings of a text in one question, 512 characters apart, and how long the placement of a long prompt
# waits for the answers: a round trip on any network, and no more than a person notices. And no more than this
# part of what reading the prompt here takes: mostly nobody has anything of it.
FETCH_LINKS, FETCH_LOOK_S, FETCH_LOOK_SHARE = 8192, 0.15, 0.02
# How long a worker waits to hear what it gets, whatever its daemon does.
FETCH_DECIDE_S = 3.0
# Fewer tokens are computed sooner than asked for.
FETCH_LEAST_TOKENS = 512
# A machine that had less than this share of what it said is left out; estimates of texts are better.
FETCH_BELIEVED = 0.3
# New tokens that are computed here as well to see that what came is right: so many at its end, which rest on
# all before them, and so many at a place that no sender can foresee. Together as many as a helper's.
FETCH_SPOT_TOKENS = SHARE_SPOT_TOKENS // 2
# A snapshot is checked by the one before it, if that is no more blocks away: so much is computed here, too.
FETCH_CHECK_BLOCKS = 4
# At which every number that comes is looked at: a core does 3 GB/s, a GPU tens.
FETCH_LOOK_BYTES_PER_S = 8 * GIB
# So long a turn of the compute thread may be taken by memory for what comes, or by looking at it: a step of
# the answers that run takes as long.
FETCH_TURN_S = 0.02
# What a fetch takes besides its bytes and round trips, and the part of computing it must save.
FETCH_FIXED_S, FETCH_LEAST_GAIN = 0.03, 0.1
# The part of a fetch that computing towards it must save: it takes cores from what opens the seals, comes in
# whole chunks, and what has come before a failure is of no use until the two meet.
FETCH_MIX_GAIN = 0.25
# A block that takes so many times as long as planned, and at least this, ends the fetch; so does a fetch that
# takes as long as computing all of it, at least this.
FETCH_LATE, FETCH_BLOCK_S = 5.0, 2.0
# A fetch that takes so many times as long as planned: its link is measured again.
FETCH_DOUBT = 2.0
# Fetches by whose median the next one from the same machine is predicted: two of them may be odd. They count
# for so long; a machine that was slow is not asked, so it must be forgotten some time.
FETCH_SPEEDS, FETCH_SPEED_S = 5, 600.0
# Questions about prompts that a machine leaves unanswered, one after the other, before it is left out.
FETCH_UNANSWERED = 2
# Then it is left out for this long, doubled by each further pair of silences, which is about what those took:
# a machine that is merely busy is soon asked again.
FETCH_SILENT_S = 2.0
# Fetches that a machine serves at once: each reads its disk as fast as it can.
FETCHES = 4
# Of these for one machine, so that one cannot take all of them.
FETCHES_PER_PEER = 2

# ---- fleetctl --------------------------------------------------------------------------------------------
# A healthy daemon answers control calls in milliseconds; a swapped-out one may need seconds.
CLIENT_CALL_S = 10.0
# fleetctl without a verb only looks: a daemon that is slower is told as one that does not answer.
CLIENT_GLANCE_S = 3.0
# Streams carry a comment every SSE_KEEPALIVE_S; this much silence means the daemon is stuck, not slow.
CLIENT_STREAM_STALL_S = 60.0
# Hashing or reading every byte of the largest model from a slow disk.
CLIENT_LONG_CALL_S = ENGINE_LOAD_S + 60.0
# How long a launched agent waits for one answer: a prefill may take 20 minutes, and others go first.
AGENT_TIMEOUT_S = 3600.0

# ---- Models on disk and on their way ---------------------------------------------------------------------
MODEL_CONFIG_BYTES = 4 * MIB
MODEL_FILES = 10_000  # entries in one model folder, at any depth
MODEL_NAME_CHARS = 200
# Threads that look models up, and that hash them. More at once would only wait for the same disk.
FILE_LOOKS, FILE_HASHES = 8, 4
OTHER_STORE_MODELS = 1_000  # looked at in another program's folders: a listing takes a moment, not a minute
OLLAMA_MANIFEST_BYTES = 64 * KIB  # they have some hundred; a thousand are read for a listing
# Up to this size a model is hashed again at every load: half a second buys certainty. Above it only when a
# file's size, time or inode changed, or when asked.
MODEL_REHASH_BYTES = 2 * GIB
# Free space that a download must leave, so that logs and the ledger can still be written.
DISK_RESERVE_BYTES = 256 * MIB
# A download reports at least once a second; this much silence means its process hangs.
PULL_SILENCE_S = 60.0
# The longest line of one names every file of a model.
PULL_LINE_BYTES = 512 * KIB
# No new byte from the source for this long ends a download; it can be resumed.
PULL_STALL_S = 120.0
# A person waits for a search of the hub.
HUB_SEARCH_S = 20.0
HUB_SEARCH_CHARS = 100
