"""Which layout: all that can exist, the hopeless dropped by formula, the others simulated, the pick for the SLO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from fullbore.errors import ConfigError
from fullbore.plan.formula import best_cycle_s, output_tokens_per_s, running_requests
from fullbore.plan.layout import Layout, replicas_are_equal, tp_problem
from fullbore.plan.predict import Prediction, predict
from fullbore.plan.scenario import Deployment, Scenario, deploy
from fullbore.plan.uncertainty import Matrix, Uncertainty

MOST_SIMULATED = 8  # layouts
SLACK = 1.3  # the formula may be wrong by this much before a layout is dropped
CHUNK_TOKENS = (512, 2048, 8192)

OnProgress = Callable[[int, int, str], None]  # (done, of, what)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What must hold, on average; None: no demand."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def validate(self) -> None:
        """Raises ConfigError for a bound that nothing can meet."""
        for flag, value in (("--slo-ttft", self.ttft_s), ("--slo-itl", self.itl_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} must be a positive number of seconds, got {value}.")

    def is_met(self, prediction: Prediction) -> bool:
        return (self.ttft_s is None or prediction.ttft_s <= self.ttft_s) and (
            self.itl_s is None or prediction.itl_s <= self.itl_s
        )


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """All that was looked at."""

    predictions: list[Prediction]  # by layout, then by concurrency
    unfit: list[Deployment]  # with the problem of each
    dropped: list[Deployment]  # fit, but the formula saw no chance
    pick: Prediction | None
    is_slo_met: bool

    @property
    def pareto(self) -> list[Prediction]:
        """Those that no other beats in both tokens per second per user and per device."""
        return pareto(self.predictions)


def pareto(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The non-dominated ones, from the fastest per user to the most per device."""
    ordered = sorted(predictions, key=lambda each: (-each.tok_s_per_user, -each.tok_s_per_device))
    front: list[Prediction] = []
    for each in ordered:
        if not front or each.tok_s_per_device > front[-1].tok_s_per_device:
            front.append(each)
    return front


def candidates(scenario: Scenario, base: Layout) -> Iterator[Layout]:
    """Stages × ranks that the devices and the model allow, in as many replicas as there is room for; rest as `base`."""
    number, layers = len(scenario.hardware), scenario.model.num_layers
    for tp in range(1, number + 1):
        if tp_problem(scenario.model, tp):
            continue
        for pp in range(1, min(number // tp, layers) + 1):
            copies = (replace(base, pp=pp, tp=tp, replicas=each) for each in range(number // (pp * tp), 0, -1))
            layout = next(each for each in copies if replicas_are_equal(scenario.hardware, each))
            yield layout
            if tp > 1 and scenario.model.has_experts and not base.dp_attention:
                yield replace(layout, dp_attention=True)


def search(
    scenario: Scenario,
    base: Layout,
    slo: Slo,
    on_progress: OnProgress | None = None,
    covariance: Matrix | None = None,
) -> SearchResult:
    """Compares layouts at every concurrency of the demand.

    Args:
        covariance: of the parameters, if they were calibrated.

    Raises:
        ConfigError: nothing fits; the message says what the nearest lacks.
    """
    asked = scenario.demand.concurrency
    if scenario.demand.rate_per_s is not None:
        asked = (max(asked),)  # for dividing layers; how many requests there are at once comes out of the simulation
    most = max(asked)
    fit: list[Deployment] = []
    unfit: list[Deployment] = []
    for layout in candidates(scenario, base):
        deployment = deploy(scenario, layout, most)
        (unfit if deployment.problem else fit).append(deployment)
    if not fit:
        nearest = min(unfit, key=lambda each: max(stage.missing_bytes for stage in each.memory.stages))
        raise ConfigError(
            f"{scenario.model.name} fits {scenario.hardware.describe()} in no layout; the nearest is "
            f"{nearest.layout.name}, where {nearest.problem}."
        )
    kept = _promising(fit, asked)
    total = len(kept) * len(asked) + len(CHUNK_TOKENS) - 1
    predictions: list[Prediction] = []
    for deployment in kept:
        uncertainty = Uncertainty(deployment, covariance)
        for concurrency in asked:
            if on_progress:
                on_progress(len(predictions), total, f"{deployment.layout.name} at concurrency {concurrency}")
            predictions.append(predict(deployment, concurrency, uncertainty))
    pick, is_met = _pick(predictions, slo)
    if base.chunk_tokens is None and pick is not None:
        pick, is_met = _better_chunk(pick, slo, on_progress, total, covariance)
    if on_progress:
        on_progress(total, total, "done")
    dropped = [each for each in fit if each not in kept]
    return SearchResult(predictions=predictions, unfit=unfit, dropped=dropped, pick=pick, is_slo_met=is_met)


def _promising(deployments: list[Deployment], concurrency: Sequence[int]) -> list[Deployment]:
    """Those that the formula puts within SLACK of the best per user or per device at some concurrency."""
    scores: dict[int, float] = {}
    for number in concurrency:
        per_device = [output_tokens_per_s(each, number) / each.layout.num_devices for each in deployments]
        per_user = [1 / best_cycle_s(each, running_requests(each, number)) for each in deployments]
        for index in range(len(deployments)):
            behind = min(max(per_device) / per_device[index], max(per_user) / per_user[index])
            scores[index] = min(scores.get(index, float("inf")), log(behind))
    ranked = sorted(scores, key=lambda index: scores[index])
    kept = [index for index in ranked if scores[index] <= log(SLACK)][:MOST_SIMULATED]
    return [deployments[index] for index in sorted(kept)]


def _pick(predictions: Sequence[Prediction], slo: Slo) -> tuple[Prediction | None, bool]:
    """The most tokens per second that meet the SLO; if none does, the one that misses it by least."""
    meeting = [each for each in predictions if slo.is_met(each)]
    if meeting:
        return max(meeting, key=lambda each: each.output_tok_s), True
    return min(predictions, key=lambda each: _excess(each, slo), default=None), False


def _excess(prediction: Prediction, slo: Slo) -> float:
    ttft = prediction.ttft_s / slo.ttft_s if slo.ttft_s else 0.0
    itl = prediction.itl_s / slo.itl_s if slo.itl_s else 0.0
    return max(ttft, itl)


def _better_chunk(
    pick: Prediction, slo: Slo, on_progress: OnProgress | None, total: int, covariance: Matrix | None
) -> tuple[Prediction, bool]:
    """The pick with the chunk size that serves it best."""
    tried = [pick]
    scenario, current = pick.deployment.scenario, pick.deployment.chunk_tokens
    others = [tokens for tokens in CHUNK_TOKENS if tokens != current]
    for done, tokens in enumerate(others, start=total - len(others)):
        if on_progress:
            on_progress(done, total, f"{pick.deployment.layout.name} with chunks of {tokens} tokens")
        layout = replace(pick.deployment.layout, chunk_tokens=tokens)
        deployment = deploy(scenario, layout, max(scenario.demand.concurrency))
        if not deployment.problem:
            tried.append(predict(deployment, pick.concurrency, Uncertainty(deployment, covariance)))
    best, is_met = _pick(tried, slo)
    assert best is not None
    # A hundredth more is noise, and the default needs no flag.
    if slo.is_met(pick) == is_met and best.output_tok_s < 1.01 * pick.output_tok_s:
        return pick, is_met
    return best, is_met
