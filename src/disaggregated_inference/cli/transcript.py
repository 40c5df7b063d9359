"""A chat on disk: JSON, with messages as every other program has them."""

from pathlib import Path
from typing import Literal

import msgspec

from disaggregated_inference.errors import BadRequest


class TranscriptMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str


class Transcript(msgspec.Struct, frozen=True):
    messages: tuple[TranscriptMessage, ...]
    model: str = ""
    system: str = ""


def write(path: Path, saved: Transcript) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")


def read(path: Path) -> Transcript:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Transcript)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path} is no chat: {error}") from error
    roles = [message.role for message in saved.messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise BadRequest(f"{path} is no chat: its messages must be of user and assistant in turn")
    return saved


def counted(messages: tuple[TranscriptMessage, ...]) -> str:
    count = len(messages) // 2
    return f"{count} turn" + ("" if count == 1 else "s")
