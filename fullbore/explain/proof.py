"""The engine's own source as proof: the lines where the setting of a fix forks the code or sizes something."""

from __future__ import annotations

from fullbore.explain.facts import Fact, Source
from fullbore.explain.situation import Situation
from fullbore.explain.source import Certainty, Place, SourceError, open_package, study
from fullbore.explain.source.package import is_test
from fullbore.explain.verdicts import Judgement

_MOST_PLACES = 8
_TELLING = ("sizes", "guards", "derives", "validates")

# (verdict, engine) -> the setting whose effect proves the fix.
_SETTINGS = {
    ("packed-slot", "sglang"): "pp_max_micro_batch_size",
    ("packed-slot", "vllm"): "max_num_seqs",
    ("packed-slot", "fullbore"): "pp_max_micro_batch_size",
    ("few-requests", "sglang"): "max_running_requests",
    ("few-requests", "vllm"): "max_num_seqs",
    ("ring-order", "sglang"): "pp_async_batch_depth",
    ("control-plane-latency", "sglang"): "pp_async_batch_depth",
    ("imbalance", "sglang"): "SGLANG_PP_LAYER_PARTITION",
    ("imbalance", "vllm"): "VLLM_PP_LAYER_PARTITION",
    ("launch-bound", "sglang"): "disable_cuda_graph",
    ("launch-bound", "vllm"): "enforce_eager",
    ("chunks-serialised", "vllm"): "async_scheduling",
    ("kv-limited", "sglang"): "mem_fraction_static",
    ("kv-limited", "vllm"): "gpu_memory_utilization",
}


def add_proof(s: Situation, judgement: Judgement, package: str | None) -> None:
    """Adds to each verdict the lines of `package` (a name or a path; None: the engine's, if it is installed).

    Raises:
        SourceError: `package` was named and cannot be read.
    """
    if s.engine is None or (package is None and s.engine not in ("sglang", "vllm")):
        return
    for finding in judgement.verdicts:
        setting = _SETTINGS.get((finding.id, s.engine))
        if setting is None:
            continue
        try:
            found = study(open_package(package or s.engine), setting)
        except SourceError:
            if package is not None:
                raise
            continue  # not installed here, or a release without this setting
        telling = [place for place in found.places if _is_telling(place)]
        finding.proof = [_fact(place, f"{found.package} {found.version}") for place in telling[:_MOST_PLACES]]


def _is_telling(place: Place) -> bool:
    """It is this setting for certain, decides something, and is part of what serves."""
    return place.role in _TELLING and place.certainty is Certainty.CERTAIN and not is_test(place.file)


def _fact(place: Place, release: str) -> Fact:
    code = place.condition or place.text
    return Fact(
        f"{release}, {place.function}: {place.role}: {' '.join(code.split())[:160]}",
        place.role,
        Source(place.file, place.line),
    )
