"""The seal on a prefill context, without an identity: a keyed hash with the node's token.

A context is `BODY` (no seal), `BODY.MAC` (sealed with a token) or `BODY.CERTIFICATE.SIGNATURE` (signed by a node), each
part in URL-safe base64. An orchestrator that holds the tokens of both nodes seals a context anew for the decode node.
"""

import base64
import hashlib
import hmac


def split_context(text: str) -> list[bytes]:
    """The decoded parts. Raises ValueError."""
    return [base64.urlsafe_b64decode(part.encode()) for part in text.split(".")]


def join_context(*parts: bytes) -> str:
    return ".".join(base64.urlsafe_b64encode(part).decode() for part in parts)


def context_mac(body: bytes, token: str) -> bytes:
    key = hashlib.blake2b(token.encode(), digest_size=32, person=b"disagg context").digest()
    return hmac.digest(key, body, "sha256")


def seal_for(context: str, token: str) -> str:
    """The same context, sealed with the token of the decode node that will get it. Signed ones stay as they are, and
    what cannot be read too: the decode node refuses it."""
    try:
        parts = split_context(context)
    except ValueError:
        return context
    if not token or len(parts) > 2:
        return context
    return join_context(parts[0], context_mac(parts[0], token))
