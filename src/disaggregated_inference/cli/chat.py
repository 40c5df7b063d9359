"""`disagg chat`: a conversation. The cluster keeps no state: every request sends all earlier messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.cli.errors import as_data
from disaggregated_inference.cli.generate import stream_text
from disaggregated_inference.cli.line_reader import LineReader
from disaggregated_inference.cli.options import CommandOptions, chat_messages, require_text
from disaggregated_inference.cli.screen import Screen, mute_logs
from disaggregated_inference.cli.transcript import Transcript, TranscriptMessage, read, write
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest, DisaggError

_COMMAND = re.compile(r"/([a-z]+)(?:[ \t]+(.*))?", re.DOTALL)  # does not match /etc/passwd
_HELP = """\
/help           show this list
/clear          start a new chat
/model NAME     switch to another model; without a name: list the models
/system TEXT    set the system message; without a text: remove it
/metrics        show nodes, times and speeds of the last completion
/save FILE      save the chat as JSON
/load FILE      load a saved chat
/retry          send the last message again
/exit           exit, like Ctrl-D
Ctrl-C stops a completion. End a line with \\ to continue it; put \"\"\" around a text of several lines."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one message."""

    text: str = ""
    metrics: dict[str, Any] | None = None
    error: DisaggError | None = None
    stopped: bool = False  # by Ctrl-C

    @property
    def is_complete(self) -> bool:
        """A stopped completion counts if it has text."""
        return self.error is None and bool(self.text or not self.stopped)


def run(
    config: str | None, token_file: str, options: CommandOptions, system: str, *, metrics: bool, as_json: bool
) -> bool:
    """Whether all messages succeeded. On a terminal always true: the user has seen the errors."""
    mute_logs()
    with DisaggregatedClient(load_config(config, token_file=token_file)) as client:
        chat = Chat(client, options, system and require_text(system), Screen(), metrics=metrics, as_json=as_json)
        lines = LineReader()
        if lines.is_terminal:
            chat.greet()
        _loop(chat, lines)
    return lines.is_terminal or not chat.failures


def _loop(chat: "Chat", lines: LineReader) -> None:
    while not chat.is_closed:
        try:
            message = lines.message()
            if message is None:
                break
            if message:
                chat.handle(message)
        except KeyboardInterrupt:  # no completion was running
            if not lines.is_terminal:
                raise
            chat.screen.note("\n(press Ctrl-D or type /exit to leave)", "dim")
    if lines.is_terminal and not chat.is_closed:
        chat.screen.note("")  # after Ctrl-D the cursor is still in the prompt's line


class Chat:
    def __init__(
        self,
        client: DisaggregatedClient,
        options: CommandOptions,
        system: str,
        screen: Screen,
        *,
        metrics: bool,
        as_json: bool,
    ) -> None:
        self.screen, self._client, self._options, self._system = screen, client, options, system
        self._verbose, self._as_json = metrics, as_json
        self._model = client.config.resolve_model(options.model)
        self._messages: tuple[TranscriptMessage, ...] = ()  # user and assistant alternate
        self._unanswered = ""
        self._last_metrics: dict[str, Any] | None = None
        self.is_closed = False
        self.failures = 0

    def greet(self) -> None:
        self.screen.note(f"{self._model}; type /help for commands, Ctrl-D to exit", "dim")

    def handle(self, text: str) -> None:
        """Handle a message or a command. An error does not end the chat."""
        try:
            command = _COMMAND.fullmatch(text)
            if command:
                self._run_command(command[1], (command[2] or "").strip())
            else:
                self._send(require_text(text), self._messages)
        except BrokenPipeError:
            raise  # the reader of our output has closed it
        except (DisaggError, OSError) as error:
            self._show_error(error)

    def _show_error(self, error: Exception) -> None:
        self.failures += 1
        self.screen.note(f"error: {error}", "red")

    def _send(self, text: str, earlier: tuple[TranscriptMessage, ...]) -> None:
        message = TranscriptMessage("user", text)
        reply = self._generate(chat_messages(self._system, *msgspec.to_builtins((*earlier, message))))
        self._unanswered = "" if reply.is_complete else text
        if reply.is_complete:
            self._messages = (*earlier, message, TranscriptMessage("assistant", reply.text))
        self._last_metrics = reply.metrics or self._last_metrics
        self._show(text, reply)

    def _generate(self, messages: list[dict[str, str]]) -> Reply:
        texts: list[str] = []

        def write(text: str) -> None:
            texts.append(text)
            if not self._as_json:
                self.screen.write(text)

        request = self._options.as_dict() | {"model": self._model, "messages": messages}
        try:
            metrics = stream_text(self._client, request, write, self.screen.note)
        except KeyboardInterrupt:
            return Reply(text="".join(texts), stopped=True)
        except DisaggError as error:
            return Reply(text="".join(texts), error=error)
        return Reply(text="".join(texts), metrics=metrics)

    def _show(self, text: str, reply: Reply) -> None:
        if self._as_json:
            self.screen.write(json.dumps(_reply_data(text, reply)) + "\n")
        self.screen.end_line()
        if reply.stopped:
            self.screen.note("(stopped)" if reply.is_complete else "(stopped; /retry sends it again)", "dim")
        if reply.error:
            self._show_error(reply.error)
        if reply.metrics:
            self.screen.show_metrics(reply.metrics, verbose=self._verbose)

    def _run_command(self, name: str, argument: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.screen.note(_HELP),
            "clear": lambda _: self._clear(),
            "model": self._set_model,
            "system": self._set_system,
            "metrics": lambda _: self._show_metrics(),
            "save": self._save,
            "load": self._load,
            "retry": lambda _: self._retry(),
            "exit": lambda _: self._close(),
        }
        if name not in commands:
            raise BadRequest(f"unknown command /{name}; /help lists the commands")
        commands[name](argument)

    def _close(self) -> None:
        self.is_closed = True

    def _clear(self) -> None:
        self._messages, self._unanswered = (), ""
        self.screen.note("new chat", "dim")

    def _set_model(self, name: str) -> None:
        if name:
            self._model = self._client.config.resolve_model(name)
        others = [other for other in self._client.config.names if other != self._model]
        self.screen.note(f"{self._model}{'; also available: ' + ', '.join(others) if others else ''}", "dim")

    def _set_system(self, text: str) -> None:
        self._system = text and require_text(text)
        self.screen.note("system message set for the next message" if text else "system message removed", "dim")

    def _show_metrics(self) -> None:
        if not self._last_metrics:
            raise BadRequest("no completion has finished yet")
        self.screen.show_metrics(self._last_metrics, verbose=True)

    def _retry(self) -> None:
        """The old completion is replaced only when the new one is complete."""
        if self._unanswered:
            return self._send(self._unanswered, self._messages)
        if not self._messages:
            raise BadRequest("there is no message to send again")
        self._send(self._messages[-2].content, self._messages[:-2])

    def _save(self, name: str) -> None:
        path = _path(name)
        write(path, Transcript(self._messages, self._model, self._system))
        self.screen.note(f"saved {len(self._messages)} messages to {path}", "dim")

    def _load(self, name: str) -> None:
        path = _path(name)
        loaded = read(path)
        self._messages, self._system, self._unanswered = loaded.messages, loaded.system, ""
        self.screen.note(f"loaded {len(loaded.messages)} messages from {path}", "dim")
        if loaded.model and loaded.model != self._model:
            self._set_model(loaded.model)


def _reply_data(text: str, reply: Reply) -> dict[str, Any]:
    error = as_data(reply.error) if reply.error else None
    metrics = {name: value for name, value in (reply.metrics or {}).items() if name != "response"}
    return {"prompt": text, "response": reply.text, "stopped": reply.stopped, "error": error, "metrics": metrics}


def _path(name: str) -> Path:
    if not name:
        raise BadRequest("file name missing")
    return Path(name).expanduser()
