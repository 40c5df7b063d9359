"""`disagg-grade web`: the grade book in a browser. Pages call what the commands call, and only look at a batch."""

from grader.web.launch import PASSWORD_VARIABLE, WebUnavailable, choose_password, run_web
from grader.web.settings import WebSettings, configure

__all__ = ["PASSWORD_VARIABLE", "WebSettings", "WebUnavailable", "choose_password", "configure", "run_web"]
