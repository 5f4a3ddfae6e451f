"""fullbore: pipeline-parallel LLM serving that stays full, and shows why when it doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from fullbore.llm import LLM
    from fullbore.scheduler.request import SamplingParams


def __getattr__(name: str) -> Any:
    # Lazy, so that `fullbore --help` and the pure packages never pay for importing torch.
    if name == "LLM":
        from fullbore.llm import LLM

        return LLM
    if name == "SamplingParams":
        from fullbore.scheduler.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'fullbore' has no attribute {name!r}")
