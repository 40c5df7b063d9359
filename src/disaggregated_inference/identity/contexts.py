"""TLS contexts whose certificate can be rotated while connections begin."""

import ssl
from typing import Any


class RotatedContext(ssl.SSLContext):
    """Connections begin with `now`, a context of its own that nothing changes any more; a rotation puts a new one in
    its place. OpenSSL copies a context's certificate for each connection without a lock: where the certificate changes
    at that moment, the process crashes. This one has none: it cannot begin a connection by itself."""

    now: ssl.SSLContext

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self.now.wrap_socket(*args, **options)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.now.wrap_bio(*args, **options)
