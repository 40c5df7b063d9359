"""How long the tests with many requests run. `make chaos` runs them for longer."""

import os

CHAOS_SECONDS = float(os.environ.get("DISAGG_CHAOS_SECONDS", "10"))
CHAOS_REQUESTS = int(os.environ.get("DISAGG_CHAOS_REQUESTS", "300"))
