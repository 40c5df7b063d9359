#!/usr/bin/env python3
"""Test the whole system: health, a prompt through each pair, both models at once, a forced fallback.

Options go to `disagg cluster test`. The exit code is 0 if everything passed.
"""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    disagg = Path(__file__).resolve().parent / "disagg"
    sys.exit(subprocess.run([disagg, "cluster", "test", *sys.argv[1:]]).returncode)
