"""Salts keep the prefix caches of callers apart: a request finds only what requests with the same salt have left."""

import hashlib
from typing import NamedTuple

_HASH_BYTES = 16


class Salt(NamedTuple):
    """Without a value: the cache that everyone shares. `shared_tokens`: how many leading tokens of the prompt everyone
    may find; only whole blocks of them are shared."""

    value: str = ""
    shared_tokens: int = 0

    def parent(self, parent: bytes, number: int, block_tokens: int) -> bytes:
        """The parent of a sequence's block by its number. The first block that is not shared gets another one, and so
        another address, as has everything after it. `person` keeps salted parents apart from addresses."""
        if not self.value or number != self.shared_tokens // block_tokens:
            return parent
        return hashlib.blake2b(parent + self.value.encode(), digest_size=_HASH_BYTES, person=b"prefix salt").digest()


NO_SALT = Salt()


def salt_of(text: str) -> str:
    """What nodes get instead of a text that names a caller. An empty text has no salt."""
    if not text:
        return ""
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=b"cache salt").hexdigest()
