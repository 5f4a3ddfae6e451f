"""A pipeline to simulate, made from what a real one recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from fullbore.errors import ConfigError
from fullbore.plan.loads import Load
from fullbore.plan.pipeline import Hop, Pipeline
from fullbore.scheduler.cost import DecodeCurve, PrefillFit
from fullbore.telemetry.accounting import Recording
from fullbore.telemetry.spans import DriverRecord, StageRecord

Steps = dict[int, dict[int, StageRecord]]  # micro-batch -> stage -> its record; only those that every stage has


@dataclass
class MeasuredCosts:
    """Decode micro-batches take what one of the same size took, drawn at random from those recorded.

    So the times vary as they did, and together on all stages as they did: what a pipeline loses to uneven micro-batches
    depends on it. Sizes that were not seen lie on the straight lines between the means; prompt chunks are added by a
    least-squares fit, on top of the decodes or of what a micro-batch costs with nothing in it.
    """

    samples: dict[int, list[tuple[float, ...]]]
    decode: Sequence[DecodeCurve]
    prefill: Sequence[PrefillFit]
    _random: Random = field(default_factory=lambda: Random(0))

    def seconds(self, load: Load) -> Sequence[float]:
        if load.prefill_tokens == 0 and load.decodes in self.samples:
            return self._random.choice(self.samples[load.decodes])
        return [
            _decodes_s(curve, load.decodes) + fit.base_s + fit.chunk_s(load.prefill_tokens)
            for curve, fit in zip(self.decode, self.prefill, strict=True)
        ]


def pipeline_of(recording: Recording) -> Pipeline:
    """Stage times, transfers and the driver's delay as they were.

    Raises:
        ConfigError: the recording holds no decoding.
    """
    launches = {r.micro_batch_id: r for r in recording.driver_records if r.event == "launch"}
    steps = _complete_steps(recording, launches)
    costs = _costs(recording, steps, launches)
    hops = [_hop(steps, stage) for stage in range(1, recording.pp_size)]
    driver_s = _plan_s(steps, launches) + _return_s(recording, steps)
    return Pipeline(num_stages=recording.pp_size, costs=costs, hops=hops, driver_s=driver_s)


def _complete_steps(recording: Recording, launches: dict[int, DriverRecord]) -> Steps:
    steps: defaultdict[int, dict[int, StageRecord]] = defaultdict(dict)
    for record in recording.stage_records:
        if record.micro_batch_id in launches:
            steps[record.micro_batch_id][record.stage] = record
    return {number: steps[number] for number in sorted(steps) if len(steps[number]) == recording.pp_size}


def _occupied_s(record: StageRecord) -> float:
    """From the moment that the stage had its input and its turn until it could take the next micro-batch."""
    start_ns = record.receive_end_ns if record.stage else record.compute_start_ns
    return (record.send_end_ns - start_ns) * 1e-9


def _costs(recording: Recording, steps: Steps, launches: dict[int, DriverRecord]) -> MeasuredCosts:
    pp_size = recording.pp_size
    samples: defaultdict[int, list[tuple[float, ...]]] = defaultdict(list)
    for number, by_stage in steps.items():
        if launches[number].prefill_tokens == 0:
            seconds = tuple(_occupied_s(by_stage[stage]) for stage in range(pp_size))
            samples[launches[number].num_decodes].append(seconds)
    if not samples:
        raise ConfigError("The recording holds no micro-batch that only decodes; record while requests are answered.")
    curves = [DecodeCurve() for _ in range(pp_size)]
    for size, seen in samples.items():
        for curve, times_s in zip(curves, zip(*seen, strict=True), strict=True):
            curve.add_point(size, _mean(times_s))
    for curve, expected_s in zip(curves, recording.decode_s, strict=False):
        _add_expected(curve, expected_s)
    fits = [PrefillFit() for _ in range(pp_size)]
    for number, by_stage in steps.items():
        launch = launches[number]
        if launch.prefill_tokens > 0:
            for stage, (curve, fit) in enumerate(zip(curves, fits, strict=True)):
                added_s = _occupied_s(by_stage[stage]) - _decodes_s(curve, launch.num_decodes)
                fit.observe(launch.prefill_tokens, 0.0, max(added_s, 0.0))
    for fit in fits:
        fit.refit()
    return MeasuredCosts(dict(samples), curves, fits)


def _decodes_s(curve: DecodeCurve, size: int) -> float:
    """Seconds for that many decodes; for none, what one takes without what a second one adds."""
    if size > 0:
        return curve.at(size)
    return min(max(2 * curve.at(1) - curve.at(2), 0.0), curve.at(1))


def _add_expected(curve: DecodeCurve, expected_s: dict[int, float]) -> None:
    """Sizes that did not occur: as the engine expected them, in proportion to what it expected of those that did."""
    ratios = [curve.seconds[size] / expected_s[size] for size in curve.sizes if expected_s.get(size)]
    for size in expected_s.keys() - curve.seconds.keys():
        curve.add_point(size, expected_s[size] * (_mean(ratios) if ratios else 1.0))


def _hop(steps: Steps, stage: int) -> Hop:
    """From the end of the stage before to this stage's start, where that was idle and so waiting for it."""
    ways_ns = [
        step[stage].receive_end_ns - step[stage - 1].send_end_ns
        for previous, step in pairwise(steps.values())
        if previous[stage].send_end_ns <= step[stage - 1].send_start_ns
    ]
    return Hop(latency_s=_mean(ways_ns) * 1e-9)


def _plan_s(steps: Steps, launches: dict[int, DriverRecord]) -> float:
    """From launch to the plan's arrival at an idle first stage."""
    ways_ns = [
        step[0].plan_received_ns - launches[step[0].micro_batch_id].at_ns
        for previous, step in pairwise(steps.values())
        if previous[0].send_end_ns <= launches[step[0].micro_batch_id].at_ns
    ]
    return _mean(ways_ns) * 1e-9


def _return_s(recording: Recording, steps: Steps) -> float:
    """From the end of sampling to the result applied."""
    returned_ns = {r.micro_batch_id: r.at_ns for r in recording.driver_records if r.event == "result"}
    last = recording.pp_size - 1
    ways_ns = [returned_ns[n] - step[last].sample_end_ns for n, step in steps.items() if n in returned_ns]
    return _mean(ways_ns) * 1e-9


def _mean(values: Iterable[float]) -> float:
    """0 if there are none, or clocks make it less. The mean, not the median: what is slow now and then adds up."""
    known = list(values)
    return max(sum(known) / len(known), 0.0) if known else 0.0
