#!/usr/bin/env python3
"""Health of all servers, and a verdict. Options go to `disagg status`, such as --config FILE.

Exit code: 0 all up; 1 a part is down, and the rest serves; 2 decode down, a model cannot be served; 3 nothing is
up; 4 there is no status, for example because the cluster file is missing.
"""

import json
import subprocess
import sys
from pathlib import Path

DISAGG = Path(__file__).resolve().parent / "disagg"
EXIT_CODES = {
    "all up": 0,
    "a node is down, others serve": 1,
    "prefill down: decode-only": 1,
    "decode down: prefill nodes write the answers": 1,
    "decode down: cannot serve": 2,
    "nothing is up": 3,
}


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    done = subprocess.run([DISAGG, "status", "--json", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        status = json.loads(done.stdout)
        code = exit_code(status["models"])
    except (ValueError, KeyError):
        return 4  # `disagg` has said why
    if "--json" in sys.argv[1:]:
        print(json.dumps({"verdict": status["verdict"], "exit_code": code, "nodes": status["nodes"]}, indent=2))
        return code
    for node in status["nodes"]:
        why = f": {node['why']}" if node["why"] else ""
        print(f"{node['role']:8} {node['name']} ({node['url']}), {node['model']}: {node['state']}{why}")
    print(f"verdict: {status['verdict']}")
    return code


def exit_code(models):
    """The worst of all models. Nothing is up only if that holds for all of them."""
    codes = [EXIT_CODES[verdict] for verdict in models.values()]
    return 2 if 3 in codes and min(codes) < 3 else max(codes)


if __name__ == "__main__":
    sys.exit(main())
