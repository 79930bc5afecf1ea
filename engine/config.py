"""The engine's settings: one frozen value, read once at start."""

import msgspec

STRICT = "strict"
ISOLATIONS = ("batch", STRICT)
MODES = ("proactive", "reactive", "recompute", "none")  # of memory_preemption


class StartError(Exception):
    """The engine cannot start, for a reason that an operator can mend. The message is one line for the operator."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is started with. The gateway passes it as one JSON document on the command line."""

    kind: str = "torch"  # torch or sim
    model: str = "smollm2-135m"  # a built-in name or a directory
    policy: str = "eg-mlfq"  # eg-mlfq or fcfs
    dtype: str = "auto"  # auto, float32, bfloat16
    device: str = "auto"  # auto, cpu, cuda
    num_threads: int = 0  # 0: cores - 1, at least 1
    max_batch_size: int = 64  # slots: rows of one step
    max_batch_tokens: int = 2048  # tokens of one step
    prefill_chunk_tokens: int = 256  # a chunk ends at a multiple of it, or where the step's tokens are used up
    prefill_chunk_us: int = 0  # the most a prompt row may take by the profile; 0: ten times a step's fixed part
    step_time_max_us: int = 0  # a step that takes as long by the profile gets no prompt row; 0: 45 times that part
    isolation: str = "batch"  # or strict: may one team's decode rows lengthen the steps of another's?
    block_size: int = 16  # tokens of one KV block
    kv_memory_bytes: int = 2 * 1024**3
    host_kv_memory_bytes: int = 4 * 1024**3  # for swapped-out KV; 0 is no host pool
    memory_preemption: str = "proactive"  # or reactive, recompute, none: how blocks are taken from paused sequences
    swap_benefit: int = 2  # gamma: a sequence is swapped out only if its turn is this many round trips away
    swap_min_run_steps: int = 8  # m: steps for which a sequence keeps its slot and blocks after its KV came back
    swap_link_percent: int = 60  # kappa: the largest part of the link's time that swapping may use
    promotion_percent: int = 20  # eta: work of promotions in the long run, in percent of time; 0 turns them off
    max_queued_requests: int = 4096  # then only teams with less than an equal part are let in
    max_outbox_bytes: int = 4 * 1024**2  # unsent events; no step runs while the outbox holds as much or more
    levels: int = 8
    fairness_window_ms: int = 1000  # tau_f
    coast: bool = True  # a team whose requests are alike is served in order of arrival
    deterministic: bool = False
    kv_canary: bool = False  # check that swapped KV comes back bit for bit; if not, its sequence ends with an error
    step_log: str = ""  # a file that gets one JSON line for each step; "" is none
    step_log_max_bytes: int = 64 * 1024**2  # a log that has grown to this is moved to FILE.1, and FILE begins again
    cache_dir: str = ""  # "" is ~/.cache/terazi
