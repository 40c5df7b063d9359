"""Two threads that decode a struct for the first time at once would end the process."""

import subprocess
import sys

import msgspec

from disaggregated_inference.struct_types import build_struct_types

# Each round has its own structs. Without the call, 200 rounds ended in SIGSEGV in each of six runs.
_RACE = """
import sys, threading
import msgspec
from disaggregated_inference.struct_types import build_struct_types

sys.setswitchinterval(1e-6)
for number in range(int(sys.argv[1])):
    inner = msgspec.defstruct("Inner", [(f"field{at}", int | str | None, None) for at in range(40)])
    outer = msgspec.defstruct("Outer", [(f"part{at}", list[inner] | None, None) for at in range(40)])
    build_struct_types()
    started = threading.Barrier(4)

    def decode():
        started.wait()
        msgspec.json.decode(b'{"part1": [{"field1": 1}]}', type=outer)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
print("done")
"""


def test_many_threads_decode_structs_that_are_built() -> None:
    done = subprocess.run([sys.executable, "-c", _RACE, "50"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_structs_are_built_before_threads_decode_them() -> None:
    class Fresh(msgspec.Struct):
        at: int

    class Undecodable(msgspec.Struct):
        both: "Fresh | Undecodable"

    build_struct_types()
    assert msgspec.json.decode(b'{"at": 1}', type=Fresh) == Fresh(1)
