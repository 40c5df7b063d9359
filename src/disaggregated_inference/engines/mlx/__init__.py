"""mlx and mlx-lm are imported here and below, nowhere else. The BLAS has to be chosen first."""

from typing import Any

from disaggregated_inference.engines.mlx.blas import load_blas
from disaggregated_inference.engines.mlx.versions import require_known_caches, require_proven_version
from disaggregated_inference.models import ModelFiles


def load(model: ModelFiles, **options: Any) -> Any:
    """Choose a BLAS, prove the version, load the model."""
    blas = load_blas()
    require_proven_version()
    require_known_caches()
    from disaggregated_inference.engines.mlx import engine

    return engine.load(model, blas=blas, **options)


__all__ = ["load"]
