"""A chat on disk: JSON, with messages as every other program has them."""

from pathlib import Path
from typing import Literal

import msgspec

from disaggregated_inference.errors import BadRequest


class Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str


class Saved(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    model: str = ""
    system: str = ""


def write(path: Path, saved: Saved) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")


def read(path: Path) -> Saved:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path} is no chat: {error}") from error
    roles = [message.role for message in saved.messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise BadRequest(f"{path} is no chat: its messages must be of user and assistant in turn")
    return saved


def counted(messages: tuple[Message, ...]) -> str:
    count = len(messages) // 2
    return f"{count} turn" + ("" if count == 1 else "s")
