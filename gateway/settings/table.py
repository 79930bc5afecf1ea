"""The table of settings: name, kind, default, help, YAML path, flag, allowed values. `gateway.settings.values` reads
them.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `kind` is str, int, bool, size, duration or choice."""

    name: str  # field of Settings
    kind: str
    default: Any
    help: str
    path: str = ""  # in the YAML file; "" is flag and environment only
    flag: str = ""  # "" has no flag
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = math.inf

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "TERAZI_" + self.name.upper()

    @property
    def unit(self) -> str:
        """What a number of this setting counts."""
        return {"size": "bytes (2GiB, 512MiB)", "duration": "time (15s, 300ms)"}.get(self.kind, "")


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "data_dir",
        "str",
        "~/.local/share/terazi",
        "Where one server keeps its database, journal, admin token and lock.",
        "",
        "--data-dir",
    ),
    Setting(
        "host",
        "str",
        "localhost",
        "Address of the OpenAI routes. localhost is both loopback addresses; :: is every address, IPv4 and IPv6.",
        "server.host",
        "--host",
    ),
    Setting("port", "int", 8080, "Port of the OpenAI routes; 0 takes a free one.", "server.port", "--port", most=65535),
    Setting("admin_host", "str", "127.0.0.1", "Address of the admin listener; keep it private.", "server.admin_host"),
    Setting(
        "admin_port",
        "int",
        8081,
        "Port of the admin listener (teams, keys, reports, /metrics); 0 takes a free one.",
        "server.admin_port",
        "--admin-port",
        most=65535,
    ),
    Setting(
        "max_body_bytes", "size", 8 << 20, "Largest request body; more is a 413.", "server.max_body_bytes", least=1024
    ),
    Setting(
        "process_above_bytes",
        "size",
        64 << 10,
        "Larger request bodies are decoded and encoded in a process of their own.",
        "server.process_above_bytes",
        least=4096,
        most=1 << 30,
    ),
    Setting(
        "prepare_team_bytes",
        "size",
        0,
        "Request bodies of one team that are read or prepared at once; further bodies wait unread. 0 is three of the "
        "largest bodies.",
        "server.prepare_team_bytes",
    ),
    Setting(
        "prepare_total_bytes",
        "size",
        0,
        "The same for all teams together; at least twice as much as for one team. 0 is four times as much.",
        "server.prepare_total_bytes",
    ),
    Setting(
        "prepare_waiting_requests",
        "int",
        64,
        "Requests of one team that may wait with an unread body, large and small bodies counted apart; more are "
        "refused with preparation_full.",
        "server.prepare_waiting_requests",
        least=1,
        most=1 << 20,
    ),
    Setting(
        "prepare_wait_seconds",
        "duration",
        30.0,
        "How long a body waits for room, and again for its turn, before it is refused with preparation_full.",
        "server.prepare_wait_seconds",
        least=0.1,
        most=3600,
    ),
    Setting(
        "prepare_run_seconds",
        "duration",
        20.0,
        "How long the process for large bodies may work on one body before it is ended and the request gets "
        "preparation_failed.",
        "server.prepare_run_seconds",
        least=1,
        most=3600,
    ),
    Setting(
        "prepare_idle_seconds",
        "duration",
        30.0,
        "How long the process for large bodies stays without work before it ends and its memory is free.",
        "server.prepare_idle_seconds",
        least=0.1,
        most=86400,
    ),
    Setting(
        "prepare_memory_bytes",
        "size",
        256 << 20,
        "The most memory that the process for large bodies may take.",
        "server.prepare_memory_bytes",
        least=128 << 20,
    ),
    Setting(
        "max_connections",
        "int",
        16384,
        "Connections of the OpenAI routes at once, and never more than the files that the process may open less 64; "
        "further ones get a 503 no_capacity.",
        "server.max_connections",
        least=1,
        most=65536,
    ),
    Setting(
        "drain_timeout",
        "duration",
        60.0,
        "After SIGTERM: how long running requests may go on before they end with an error event.",
        "server.drain_timeout",
        "--drain-timeout",
        most=86400,
    ),
    Setting(
        "early_headers_after",
        "duration",
        15.0,
        "A stream that waits longer than this for its first token gets its headers and keep-alive comments.",
        "server.early_headers_after",
        least=0.05,
        most=3600,
    ),
    Setting(
        "keep_alive_timeout",
        "duration",
        75.0,
        "Idle time after which a connection is closed; keep it above the clients' and below the load balancer's.",
        "server.keep_alive_timeout",
        least=1,
        most=3600,
    ),
    Setting(
        "store_url", "str", "", "SQLAlchemy URL; empty is SQLite in the data directory.", "store.url", "--store-url"
    ),
    Setting(
        "store_lock_grace",
        "duration",
        5.0,
        "PostgreSQL: the server is not ready when it has lost the connection that holds the store's lock for longer.",
        "store.lock_grace",
        most=3600,
    ),
    Setting(
        "journal_fsync_interval",
        "duration",
        0.05,
        "Bookings younger than this can be lost at power failure.",
        "store.journal_fsync_interval",
        least=0.001,
        most=60,
    ),
    Setting(
        "on_error",
        "choice",
        "serve",
        "What to do while the database is away: serve as long as the journal has room, or deny at once with 503.",
        "store.on_error",
        choices=("serve", "deny"),
    ),
    Setting(
        "engine",
        "choice",
        "torch",
        "The real engine, or a simulated engine without a model.",
        "engine.kind",
        "--engine",
        ("torch", "sim"),
    ),
    Setting(
        "engine_socket",
        "str",
        "",
        "Use the engine that `terazi engine --listen PATH` runs there; empty starts one of our own.",
        "engine.socket",
        "--engine-socket",
    ),
    Setting(
        "engine_short_life",
        "duration",
        60.0,
        "A life of the engine that is not longer than this is short. After a longer life, counting starts anew.",
        "engine.short_life",
        least=1,
        most=86400,
    ),
    Setting(
        "engine_short_lives_max",
        "int",
        5,
        "After so many short lives in a row the engine is failing: /readyz says why, and each pause before a start is "
        "the longest.",
        "engine.short_lives_max",
        least=1,
        most=1000,
    ),
    Setting(
        "engine_restart_pause_max",
        "duration",
        60.0,
        "Longest pause before the engine is started again; pauses double from 0.5 s up to this.",
        "engine.restart_pause_max",
        least=0.5,
        most=86400,
    ),
    Setting("model", "str", "smollm2-135m", "A built-in name or a model directory.", "engine.model", "--model"),
    Setting("policy", "choice", "eg-mlfq", "Order of requests.", "engine.policy", "--policy", ("eg-mlfq", "fcfs")),
    Setting(
        "coast",
        "bool",
        True,
        "Serve a team's requests in order of arrival while they are all about as long (eg-mlfq only).",
        "engine.coast",
    ),
    Setting(
        "dtype",
        "choice",
        "auto",
        "Number format of weights and KV.",
        "engine.dtype",
        "",
        ("auto", "float32", "bfloat16"),
    ),
    Setting("device", "choice", "auto", "Where the model runs.", "engine.device", "", ("auto", "cpu", "cuda")),
    Setting("num_threads", "int", 0, "Threads of the engine; 0 is cores - 1.", "engine.num_threads", most=1024),
    Setting(
        "max_batch_size",
        "int",
        64,
        "Slots: the most sequences in one step.",
        "engine.max_batch_size",
        "--max-batch-size",
        least=1,
        most=4096,
    ),
    Setting(
        "max_batch_tokens",
        "int",
        2048,
        "The most tokens computed in one step.",
        "engine.max_batch_tokens",
        "--max-batch-tokens",
        least=1,
        most=1 << 20,
    ),
    Setting(
        "prefill_chunk_tokens",
        "int",
        256,
        "Prompts are computed in chunks that end at multiples of so many tokens, or where the step's tokens are used "
        "up.",
        "engine.prefill_chunk_tokens",
        least=1,
        most=1 << 20,
    ),
    Setting(
        "prefill_chunk_time",
        "duration",
        0.0,
        "The most that one request's chunk of a prompt may add to a step, by the step profile. A chunk is a block at "
        "least. 0s is ten times the fixed part of a step.",
        "engine.prefill_chunk_time",
        most=60,
    ),
    Setting(
        "step_time_max",
        "duration",
        0.0,
        "A step that takes as long, by the step profile, gets no further chunk of a prompt. A smaller value makes "
        "newcomers wait less and costs throughput. 0s is 45 times the fixed part of a step.",
        "engine.step_time_max",
        most=60,
    ),
    Setting(
        "isolation",
        "choice",
        "batch",
        "Whether a team's decode rows may make the steps of other teams longer than their shares say: batch lets them, "
        "strict does not, and leaves slots empty for it.",
        "engine.isolation",
        choices=("batch", "strict"),
    ),
    Setting("block_size", "int", 16, "Tokens of one KV block.", "engine.block_size", least=1, most=1024),
    Setting(
        "kv_memory", "size", 2 << 30, "Device memory for the KV cache.", "engine.kv_memory", "--kv-memory", least=1
    ),
    Setting(
        "host_kv_memory",
        "size",
        4 << 30,
        "Host memory for swapped KV. With 0 nothing is swapped.",
        "engine.host_kv_memory",
        "--host-kv-memory",
    ),
    Setting(
        "memory_preemption",
        "choice",
        "proactive",
        "How KV blocks are taken from paused sequences: swap ahead of time, swap when a sequence is refused, drop and "
        "recompute, or never.",
        "engine.memory_preemption",
        choices=("proactive", "reactive", "recompute", "none"),
    ),
    Setting(
        "swap_benefit",
        "int",
        2,
        "To let another sequence start or return, a sequence is swapped out only if its own turn is at least so many "
        "round trips of its KV away.",
        "engine.swap_benefit",
        least=0,
        most=1000,
    ),
    Setting(
        "swap_min_run_steps",
        "int",
        8,
        "Minimum run: steps of its own for which a sequence that was swapped in, or has computed its KV again, keeps "
        "its blocks, and keeps its slot while its team is eligible.",
        "engine.swap_min_run_steps",
        least=0,
        most=10_000,
    ),
    Setting(
        "swap_link_percent",
        "int",
        60,
        "The part of the time of the link between device and host that swapping may use, in percent. Moves that are "
        "made because nothing could run are not held back.",
        "engine.swap_link_percent",
        least=1,
        most=100,
    ),
    Setting(
        "promotion_percent",
        "int",
        20,
        "Work that promotions of starving requests may do in the long run, in percent of time; 0 promotes none.",
        "engine.promotion_percent",
        least=0,
        most=99,
    ),
    Setting(
        "max_queued_requests",
        "int",
        4096,
        "Requests that wait in the engine. Beyond that, only teams with less than an equal part of it are let in; the "
        "others get queue_full.",
        "engine.max_queued_requests",
        least=1,
        most=1 << 20,
    ),
    Setting(
        "default_max_tokens",
        "int",
        1024,
        "max_tokens of a request without max_tokens, clamped to the context.",
        "engine.default_max_tokens",
        least=1,
        most=1 << 20,
    ),
    Setting(
        "deterministic",
        "bool",
        False,
        "Reserved: recomputed KV equal to the bit (docs/exactness.md). No effect yet.",
        "engine.deterministic",
    ),
    Setting(
        "kv_canary",
        "bool",
        False,
        "Check that swapped KV comes back bit for bit; a sequence whose KV does not ends with an error.",
        "engine.kv_canary",
    ),
    Setting(
        "step_log",
        "str",
        "",
        "A file that gets one JSON line for each step of the engine; empty is no file.",
        "engine.step_log",
    ),
    Setting(
        "step_log_max_bytes",
        "size",
        64 << 20,
        "A larger step log is moved to FILE.1 and begun again.",
        "engine.step_log_max_bytes",
        least=4096,
    ),
    Setting(
        "cache_dir",
        "str",
        "",
        "Converted models, step profiles and compiled kernels; empty is ~/.cache/terazi.",
        "engine.cache_dir",
    ),
    Setting(
        "log_format", "choice", "json", "One JSON object a line, or plain text.", "logging.format", "", ("json", "text")
    ),
    Setting(
        "log_level",
        "choice",
        "info",
        "The least level that is written to the log.",
        "logging.level",
        "",
        ("debug", "info", "warning", "error"),
    ),
    Setting(
        "refusal_lines_per_minute",
        "int",
        60,
        "Log lines a minute about refused calls, for each listener, error code and key (or address); 0 writes none.",
        "logging.refusal_lines_per_minute",
        most=1_000_000,
    ),
)
