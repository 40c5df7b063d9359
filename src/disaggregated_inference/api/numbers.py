"""Numbers that a node reports, within bounds: a node may be of another version, or lie."""

from typing import Annotated

from msgspec import Meta

Number = Annotated[int, Meta(ge=0, le=1 << 53)]  # of tokens, bytes or requests
Size = Annotated[int, Meta(ge=1, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]  # seconds, watts, or something per second
