"""Readings from programs of the system, within a time limit."""

import shutil
import subprocess

from disaggregated_inference.doctor.findings import CannotRead
from disaggregated_inference.timeouts import DoctorTimeouts

# A command by ssh has a short PATH.
_PATH = "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin:/opt/homebrew/bin:/usr/libexec/ApplicationFirewall"


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_PATH)


def output_of(program: str, *arguments: str, timeouts: DoctorTimeouts = DoctorTimeouts()) -> str:
    """Standard output of a program. Raises `CannotRead` if it is missing, fails or does not end."""
    path = find_program(program)
    if not path:
        raise CannotRead(f"{program} is not installed")
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeouts.program_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise CannotRead(f"{program} did not end within {timeouts.program_s:.0f} s") from None
    except OSError as error:
        raise CannotRead(f"{program} cannot be run: {error.strerror}") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise CannotRead(f"{program} failed: {words[-1] if words else f'exit code {done.returncode}'}")
    return done.stdout
