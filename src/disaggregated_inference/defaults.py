"""Defaults and limits that several packages share. It imports nothing: the commands read it, and `--help` is fast."""

PREFILL_PORT, DECODE_PORT = 8000, 8001
PORTS = {"prefill": PREFILL_PORT, "decode": DECODE_PORT, "both": DECODE_PORT}  # of `disagg serve`, by role
KV_PORT = 8100

MAX_TOKENS = 2000  # of a completion, where neither client nor cluster file names a limit
TEMPERATURE = 0.2
MAX_TEMPERATURE = 100
MAX_REQUEST_S = 86400
