"""A saved chat: a JSON file with messages in the OpenAI form."""

from pathlib import Path
from typing import Literal

import msgspec

from disaggregated_inference.errors import BadRequest
from disaggregated_inference.private_files import make_private, private_opener


class TranscriptMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant"]
    content: str


class Transcript(msgspec.Struct, frozen=True):
    messages: tuple[TranscriptMessage, ...]
    model: str = ""
    system: str = ""


def write(path: Path, transcript: Transcript) -> None:
    make_private(path)
    with open(path, "wb", opener=private_opener) as file:
        file.write(msgspec.json.format(msgspec.json.encode(transcript)) + b"\n")


def read(path: Path) -> Transcript:
    try:
        transcript = msgspec.json.decode(path.read_bytes(), type=Transcript)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path} is not a saved chat: {error}") from error
    roles = [message.role for message in transcript.messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise BadRequest(f"{path} is not a saved chat: user and assistant messages must alternate")
    return transcript
