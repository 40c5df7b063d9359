"""Frames with a keyed checksum: the authenticated mode, in which nothing is secret and nothing can be altered.

The ticket's secret never crosses the connection: both ends know it, and it is the key. Each frame ends with a tag of 16
bytes: AES-128-GMAC over header and payload, with a number for each frame of a direction, so that no frame can be
altered, left out, repeated or sent back. Keys come from the secret and a nonce of each side (HKDF-SHA256).
"""

import hmac
import secrets
from typing import Literal

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TAG_BYTES = 16
NONCE_BYTES = 16
_KEY_BYTES = 16

Side = Literal["receiver", "sender"]


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


class FrameMac:
    """The tag of one frame, block by block."""

    def __init__(self, key: bytes, number: int) -> None:
        self._gcm = Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "little"))).encryptor()

    def update(self, block: bytes | bytearray | memoryview) -> None:
        self._gcm.authenticate_additional_data(block)

    def tag(self) -> bytes:
        self._gcm.finalize()
        return self._gcm.tag

    def is_tag(self, received: bytes | bytearray) -> bool:
        return hmac.compare_digest(self.tag(), bytes(received))


class FrameKeys:
    """A key for each direction of one connection. `sender_nonce` is empty until WELCOME brings it: until then HELLO,
    and a refusal of it, have keys of their own."""

    def __init__(self, side: Side, secret: str, receiver_nonce: str, sender_nonce: str = "") -> None:
        self._side, self._secret, self._receiver_nonce = side, secret, receiver_nonce
        self._keys = {each: self._derive(each, sender_nonce) for each in ("receiver", "sender")}
        self._numbers = {"receiver": 0, "sender": 0}

    def _derive(self, side: str, sender_nonce: str) -> bytes:
        info = f"disagg kv v1 {side}".encode()
        salt = bytes.fromhex(self._receiver_nonce) + bytes.fromhex(sender_nonce)
        return HKDF(hashes.SHA256(), _KEY_BYTES, salt, info).derive(self._secret.encode())

    def complete(self, sender_nonce: str) -> "FrameKeys":
        """Those of every frame from WELCOME on."""
        return FrameKeys(self._side, self._secret, self._receiver_nonce, sender_nonce)

    def sending(self) -> FrameMac:
        return self._next(self._side)

    def receiving(self) -> FrameMac:
        return self._next("sender" if self._side == "receiver" else "receiver")

    def _next(self, side: str) -> FrameMac:
        number = self._numbers[side]
        self._numbers[side] = number + 1
        return FrameMac(self._keys[side], number)


def is_nonce(text: object) -> bool:
    return isinstance(text, str) and len(text) == 2 * NONCE_BYTES and all(c in "0123456789abcdef" for c in text)
