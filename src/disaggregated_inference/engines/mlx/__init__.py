"""The MLX engine. Only this package imports mlx and mlx-lm, after a BLAS is chosen."""

from typing import Any

from disaggregated_inference.engines.mlx.blas import load_blas
from disaggregated_inference.engines.mlx.versions import require_known_caches, require_tested_version
from disaggregated_inference.models import ModelFiles


def load(model: ModelFiles, **options: Any) -> Any:
    """Choose a BLAS, check mlx-lm's version, load the model."""
    blas = load_blas()
    require_tested_version()
    require_known_caches()
    from disaggregated_inference.engines.mlx import engine

    return engine.load(model, blas=blas, **options)


__all__ = ["load"]
