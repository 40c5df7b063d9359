"""Adds checksums to event streams, for clients that read them."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.api import CHECKSUM_HEADER, checksum

_NAME = CHECKSUM_HEADER.encode()


class StreamChecksums:
    """Adds the sums to the event streams of clients that sent a checksum themselves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not any(name == _NAME for name, _ in scope["headers"]):
            return await self._app(scope, receive, send)
        streaming, so_far = False, 0

        async def send_with_sum(message: Message) -> None:
            nonlocal streaming, so_far
            if message["type"] == "http.response.start":
                headers = message["headers"]
                streaming = any(
                    name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
                )
                if streaming:
                    message["headers"] = [*headers, (_NAME, b"crc32")]
            elif streaming and (body := message.get("body")):
                so_far = checksum(body, so_far)
                message["body"] = b"%b: sum %08x\n\n" % (body, so_far)
            await send(message)

        await self._app(scope, receive, send_with_sum)
