"""Adds checksums to responses, for clients that read them."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.api import CHECKSUM_HEADER, checksum, checksum_text
from disaggregated_inference.http.body_writer import without_body_writer

_NAME = CHECKSUM_HEADER.encode()


class StreamChecksums:
    """For clients that sent a checksum themselves: sums within event streams, and in the head of every response whose
    body is sent in one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not any(name == _NAME for name, _ in scope["headers"]):
            return await self._app(scope, receive, send)
        streaming, so_far, held = False, 0, None

        async def send_with_sum(message: Message) -> None:
            nonlocal streaming, so_far, held
            if message["type"] == "http.response.start":
                streaming = _is_event_stream(message)
                if not streaming:
                    held = message  # until its body is there
                    return
                message = _with_header(message, b"crc32")
            elif body := message.get("body") if streaming else None:
                so_far = checksum(body, so_far)
                message["body"] = b"%b: sum %08x\n\n" % (body, so_far)
            elif held:
                whole = message["type"] == "http.response.body" and not message.get("more_body")
                start, held = held, None
                await send(_with_header(start, checksum_text(message.get("body", b"")).encode()) if whole else start)
            await send(message)

        await self._app(without_body_writer(scope), receive, send_with_sum)


def _is_event_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def _with_header(start: Message, value: bytes) -> Message:
    return {**start, "headers": [*start["headers"], (_NAME, value)]}
