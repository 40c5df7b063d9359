"""The supported versions of mlx-lm: its cache classes are internals that change between patch releases.

A version is added here after the contract suite has passed on it.
"""

from importlib.metadata import version

from disaggregated_inference.errors import EngineUnavailable

TESTED_VERSIONS = ("0.32.0", "0.32.1", "0.32.2")


def require_tested_version(found: str | None = None) -> str:
    found = found or version("mlx-lm")
    if found not in TESTED_VERSIONS:
        raise EngineUnavailable(
            f"mlx-lm {found} has not been tested: it might misread a KV cache. "
            f"Tested: {', '.join(TESTED_VERSIONS)}; run: pip install mlx-lm=={TESTED_VERSIONS[-1]}"
        )
    return found


def require_known_caches() -> None:
    """Check that the installed cache classes have the attributes that this engine sets."""
    from mlx_lm.models import cache

    expected = {
        cache.KVCache: ((), ("keys", "values", "offset")),
        cache.RotatingKVCache: ((4,), ("keys", "values", "offset", "_idx", "keep", "max_size")),
        cache.BatchKVCache: (([0],), ("keys", "values", "offset", "left_padding", "_idx")),
        cache.BatchRotatingKVCache: ((4, [0]), ("keys", "values", "offset", "left_padding", "_idx", "_offset")),
    }
    for kind, (arguments, names) in expected.items():
        made = kind(*arguments)
        missing = [name for name in names if not hasattr(made, name)]
        if missing:
            raise EngineUnavailable(f"mlx-lm's {kind.__name__} has no {', '.join(missing)}: an unknown cache format")
