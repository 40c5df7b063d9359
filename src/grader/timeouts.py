"""Time limits of the grader's parts. Those of its worker are in `worker/timeouts.py`. The driver runs inside the
sandbox, without this package, and has times of its own. What a rubric or a command configures is not here."""

import msgspec


class SandboxTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The re-run of a notebook (package `sandbox`)."""

    try_s: float = 20.0  # for a sandbox that runs nothing, to see whether it works here
    startup_s: float = 180.0  # for a kernel, on a busy machine
    slack_s: float = 60.0  # for the ends of interrupted cells


class PagesTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """`disagg-grade web` (package `web`)."""

    form_s: float = 10.0  # for the form to arrive: a client without the password must not keep its connection for ever
    wrong_s: float = 1.0  # after a wrong password, before the next guess from the same address is looked at
    session_s: float = 12 * 3600.0  # without a request


class EndpointTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Models that are asked (package `models`)."""

    list_s: float = 10.0  # for the list of models
    prefill_s: float = 600.0  # for a prompt, where the grader starts nodes on this machine


class ProgramTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Other programs and processes on this machine."""

    line_s: float = 10.0  # where there is no terminal, a line on the progress this often
    print_s: float = 60.0  # for a browser to print a report
    stop_s: float = 20.0  # for `disagg up` to end after SIGTERM; then it is killed
    database_s: float = 30.0  # for another process that writes into the grade book
