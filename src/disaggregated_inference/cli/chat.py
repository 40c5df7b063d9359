"""`disagg chat`: turns that build on each other. The cluster keeps no state of it: every turn sends all before it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.cli.errors import as_data as wrong
from disaggregated_inference.cli.generate import streamed
from disaggregated_inference.cli.line_reader import LineReader
from disaggregated_inference.cli.options import AnswerOptions, checked, messages_of
from disaggregated_inference.cli.screen import Screen, hush
from disaggregated_inference.cli.transcript import Transcript, TranscriptMessage, counted, read, write
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.errors import BadRequest, DisaggError

_COMMAND = re.compile(r"/([a-z]+)(?:[ \t]+(.*))?", re.DOTALL)  # /etc/passwd is none
_HELP = """\
/help           this list
/clear          forget all turns
/model NAME     go on with another model; without a name: which there are
/system TEXT    what the model is told before all else; without a text: nothing
/metrics        who wrote the last answer, and how fast
/save FILE      write the chat down, as JSON
/load FILE      go on with one that was
/retry          ask the last thing again
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; \"\"\" begins and ends a long text."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one turn."""

    text: str = ""
    metrics: dict[str, Any] | None = None
    error: DisaggError | None = None
    stopped: bool = False  # by Ctrl-C

    @property
    def kept(self) -> bool:
        """An answer that was stopped is one, as far as it goes."""
        return self.error is None and bool(self.text or not self.stopped)


def run(config: str | None, rules: AnswerOptions, system: str, *, metrics: bool, as_json: bool) -> bool:
    """Whether nothing went wrong, which only those ask who do not sit at a terminal."""
    hush()
    with DisaggregatedClient(config) as client:
        chat = Chat(client, rules, system and checked(system), Screen(), metrics=metrics, as_json=as_json)
        lines = LineReader()
        if lines.is_terminal:
            chat.greet()
        _talk(chat, lines)
    return lines.is_terminal or not chat.failures


def _talk(chat: "Chat", lines: LineReader) -> None:
    while not chat.is_over:
        try:
            message = lines.message()
            if message is None:
                break
            if message:
                chat.take(message)
        except KeyboardInterrupt:  # while nothing was being written
            if not lines.is_terminal:
                raise
            chat.screen.note("\n(Ctrl-D or /exit leaves)", "dim")
    if lines.is_terminal and not chat.is_over:
        chat.screen.note("")  # Ctrl-D leaves the cursor behind the prompt


class Chat:
    def __init__(
        self,
        client: DisaggregatedClient,
        rules: AnswerOptions,
        system: str,
        screen: Screen,
        *,
        metrics: bool,
        as_json: bool,
    ) -> None:
        self.screen, self._client, self._rules, self._system = screen, client, rules, system
        self._shows_metrics, self._as_json = metrics, as_json
        self._model = client.config.resolve_model(rules.model)
        self._messages: tuple[TranscriptMessage, ...] = ()  # a question and its answer, in turns
        self._unanswered = ""
        self._told: dict[str, Any] | None = None
        self.is_over = False
        self.failures = 0

    def greet(self) -> None:
        self.screen.note(f"{self._model}; /help says what can be typed, Ctrl-D leaves", "dim")

    def take(self, text: str) -> None:
        """A message or a command. What goes wrong ends a turn, never the chat."""
        try:
            command = _COMMAND.fullmatch(text)
            if command:
                self._obey(command[1], (command[2] or "").strip())
            else:
                self._ask(checked(text), self._messages)
        except BrokenPipeError:
            raise  # nobody reads the answers any more
        except (DisaggError, OSError) as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        self.failures += 1
        self.screen.note(f"error: {error}", "red")

    def _ask(self, text: str, before: tuple[TranscriptMessage, ...]) -> None:
        question = TranscriptMessage("user", text)
        reply = self._reply(messages_of(self._system, *msgspec.to_builtins((*before, question))))
        self._unanswered = "" if reply.kept else text
        if reply.kept:
            self._messages = (*before, question, TranscriptMessage("assistant", reply.text))
        self._told = reply.metrics or self._told
        self._show(text, reply)

    def _reply(self, messages: list[dict[str, str]]) -> Reply:
        pieces: list[str] = []

        def put(piece: str) -> None:
            pieces.append(piece)
            if not self._as_json:
                self.screen.write(piece)

        ask = self._rules.options | {"model": self._model, "messages": messages}
        try:
            told = streamed(self._client, ask, put)
        except KeyboardInterrupt:
            return Reply(text="".join(pieces), stopped=True)
        except DisaggError as error:
            return Reply(text="".join(pieces), error=error)
        return Reply(text="".join(pieces), metrics=told)

    def _show(self, text: str, reply: Reply) -> None:
        if self._as_json:
            self.screen.write(json.dumps(_as_data(text, reply)) + "\n")
        self.screen.end_line()
        if reply.stopped:
            self.screen.note("(stopped)" if reply.kept else "(stopped; /retry asks again)", "dim")
        if reply.error:
            self._complain(reply.error)
        if reply.metrics:
            self.screen.about(reply.metrics, wanted=self._shows_metrics)

    def _obey(self, name: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.screen.note(_HELP),
            "clear": lambda _: self._clear(),
            "model": self._take_model,
            "system": self._take_system,
            "metrics": lambda _: self._show_metrics(),
            "save": self._save,
            "load": self._load,
            "retry": lambda _: self._retry(),
            "exit": lambda _: self._leave(),
        }
        if name not in commands:
            raise BadRequest(f"there is no /{name}; /help says what there is")
        commands[name](rest)

    def _leave(self) -> None:
        self.is_over = True

    def _clear(self) -> None:
        self._messages, self._unanswered = (), ""
        self.screen.note("a new chat", "dim")

    def _take_model(self, name: str) -> None:
        if name:
            self._model = self._client.config.resolve_model(name)
        others = [other for other in self._client.config.names if other != self._model]
        self.screen.note(f"{self._model}{'; there is also ' + ', '.join(others) if others else ''}", "dim")

    def _take_system(self, text: str) -> None:
        self._system = text and checked(text)
        self.screen.note("from the next turn on" if text else "no system message", "dim")

    def _show_metrics(self) -> None:
        if not self._told:
            raise BadRequest("no answer came to its end yet")
        self.screen.about(self._told, wanted=True)

    def _retry(self) -> None:
        """The answer that is there goes when another has come."""
        if self._unanswered:
            return self._ask(self._unanswered, self._messages)
        if not self._messages:
            raise BadRequest("nothing was asked yet")
        self._ask(self._messages[-2].content, self._messages[:-2])

    def _save(self, name: str) -> None:
        path = _path(name)
        write(path, Transcript(self._messages, self._model, self._system))
        self.screen.note(f"{counted(self._messages)} in {path}", "dim")

    def _load(self, name: str) -> None:
        path = _path(name)
        saved = read(path)
        self._messages, self._system, self._unanswered = saved.messages, saved.system, ""
        self.screen.note(f"{counted(saved.messages)} from {path}", "dim")
        if saved.model and saved.model != self._model:
            self._take_model(saved.model)


def _as_data(text: str, reply: Reply) -> dict[str, Any]:
    error = wrong(reply.error) if reply.error else None
    metrics = {name: value for name, value in (reply.metrics or {}).items() if name != "response"}
    return {"prompt": text, "response": reply.text, "stopped": reply.stopped, "error": error, "metrics": metrics}


def _path(name: str) -> Path:
    if not name:
        raise BadRequest("name a file")
    return Path(name).expanduser()
