"""Each cause of idle time in a recording, taken away in a simulation of the same stages and the same load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from fullbore.explain.evidence.account import Account
from fullbore.explain.physics import balanced_partition, stage_costs
from fullbore.explain.replay import MOST_CLIENTS, Replay

LEAST_FACTOR = 1.08  # a smaller gain is within a simulation's error


def fixes_of(account: Account) -> Fixes:
    """What can be simulated of this account; nothing where it has no recording."""
    return Fixes(account, account.replay)


@dataclass
class Fixes:
    """Gains by cause, as factors of the recorded tokens/s."""

    account: Account
    replay: Replay | None
    _factors: dict[str, float | None] = field(default_factory=dict)

    def factor(self, cause: str) -> float | None:
        """Tokens/s without the cause over tokens/s with it; None if that cannot be simulated."""
        if cause not in self._factors:
            self._factors[cause] = self._simulated(cause)
        return self._factors[cause]

    def _simulated(self, cause: str) -> float | None:
        replay = self.replay
        if replay is None:
            return None
        stages = replay.pipeline.num_stages
        if cause == "packed":
            return replay.factor(micro_batches="auto")
        if replay.micro_batches != "auto" and (self.factor("packed") or 0.0) < LEAST_FACTOR:
            replay = replace(replay, micro_batches="auto")  # so few because the scheduler found that best
        if cause == "few-requests":
            return replay.factor(clients=max(replay.clients, stages), max_running=MOST_CLIENTS)
        if cause == "transfer":
            return replay.factor(pipeline=replay.without_hops())
        if cause == "control":
            return replay.factor(pipeline=replace(replay.pipeline, driver_s=0.0))
        if cause == "depth":
            return replay.factor(depth="auto")
        if cause == "memory":
            return replay.factor_of_recorded(max_running=MOST_CLIENTS)  # the KV cache's size is not recorded
        if cause == "imbalance" and self.balanced:
            return replay.factor(pipeline=replay.with_stage_factors(self._balanced_factors()))
        return None

    @property
    def balanced_factor(self) -> float:
        """The largest stage's time now over the largest one's of the balanced split."""
        pairs = zip(self._balanced_factors(), self.account.stage_s, strict=True)
        return max(self.account.stage_s) / max(factor * before_s for factor, before_s in pairs)

    def _balanced_factors(self) -> list[float]:
        layers_s = stage_costs(self._layer_costs, self.balanced)
        entries = zip(layers_s, self._fixed_s, self.account.stage_s, strict=True)
        return [(of_layers_s + fixed_s) / before_s for of_layers_s, fixed_s, before_s in entries]

    @cached_property
    def balanced(self) -> list[int]:
        """Layers per stage with the least largest stage; [] where times or layers are not known."""
        account = self.account
        is_known = len(account.layers) == len(account.stage_s) >= 2
        if not is_known or min(account.layers) < 1 or min(account.stage_s) <= 0:
            return []
        return balanced_partition(self._layer_costs, len(account.stage_s), self._fixed_s)

    @cached_property
    def _fixed_s(self) -> list[float]:
        """What the last stage takes beyond the mean layer of the others is its head, and stays there."""
        *others, last = zip(self.account.stage_s, self.account.layers, strict=True)
        layer_s = sum(seconds for seconds, _ in others) / sum(layers for _, layers in others)
        return [*(0.0 for _ in others), max(last[0] - last[1] * layer_s, 0.0)]

    @cached_property
    def _layer_costs(self) -> list[float]:
        """Each layer at its stage's time, without what is fixed, divided by the stage's layers."""
        entries = zip(self.account.stage_s, self._fixed_s, self.account.layers, strict=True)
        return [(seconds - fixed_s) / layers for seconds, fixed_s, layers in entries for _ in range(layers)]
