"""A prefix cache that is restarted over one folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disaggregated_inference.kv import KVLayout
from disaggregated_inference.kv.prefix_cache import DiskTier, PrefixCache
from tests.support.prefix_rows import FULL, LOTS, Reopen, make


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """A store over the same folder, as after a restart; the one before is closed."""
    made: list[PrefixCache] = []

    def again(layout: KVLayout = FULL, disk_limit: int = LOTS, **more: object) -> PrefixCache:
        for store in made:
            store.close()
        made.append(make(layout, disk=DiskTier(tmp_path, disk_limit), **more))  # type: ignore[arg-type]
        return made[-1]

    yield again
    made[-1].close()
