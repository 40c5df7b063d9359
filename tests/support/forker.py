"""The process that forks nodes (see forked.py): `forker.py FD ENGINE...`."""

import gc
import importlib
import json
import os
import socket
import sys

from disaggregated_inference.cli.main import main
from disaggregated_inference.engines.mlx.blas import load_blas


def _import_engines(engines: list[str]) -> None:
    load_blas()
    importlib.import_module("disaggregated_inference.node_process")
    for engine in engines:
        importlib.import_module(f"disaggregated_inference.engines.{engine}.engine")
    if "torch" in engines:
        importlib.import_module("transformers.models.llama.modeling_llama")
    gc.freeze()


def _fork() -> int:
    """0 in the grandchild, its process id here. The child ends at once, so that pytest adopts the grandchild."""
    near, far = os.pipe()
    if child := os.fork():
        os.close(far)
        os.waitpid(child, 0)
        pid = int(os.read(near, 100))
        os.close(near)
        return pid
    if grandchild := os.fork():
        os.write(far, str(grandchild).encode())
        os._exit(0)
    os.close(near)
    os.close(far)
    return 0


def _become(arguments: list[str], environment: dict[str, str], folder: str, files: list[int]) -> None:
    for fd, file in zip((1, 2, 0), files, strict=False):  # without the last, there is nothing to read
        os.dup2(file, fd)
        os.close(file)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["disagg", *arguments]


def _wait_for_orders(fd: int) -> bool:
    """True in a new node, False when pytest has ended."""
    with socket.socket(fileno=fd) as orders:
        while True:
            message, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
            if not message:
                return False
            if pid := _fork():
                orders.send(str(pid).encode())
                for file in files:
                    os.close(file)
            else:
                arguments, environment, folder = json.loads(message)
                _become(arguments, environment, folder, files)
                return True


def _run() -> int:
    """The command's exit code."""
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


if __name__ == "__main__":
    _import_engines(sys.argv[2:])
    if _wait_for_orders(int(sys.argv[1])):
        if sys.argv[1:2] == ["serve"]:  # a node ends as it does elsewhere
            main()
        else:  # taking down all that was imported costs half a second, more than most commands
            code = _run()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
