"""The driver: `python -m fullbore.engine.driver`, started by the client with a DriverSetup on standard input.

It owns the scheduler and the stage processes. One loop: take messages from the client and the stages, launch what
can be launched, hand out tokens, look after the stages.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from dataclasses import asdict

import msgspec

from fullbore.engine import run_dir
from fullbore.engine.admission import make_scheduler_request
from fullbore.engine.child import ParentWatch, StoppedParent, ignore_terminal_signals
from fullbore.engine.grammar import GrammarCompiler, GrammarConstraint, GrammarQueue, Pending
from fullbore.engine.links import POLL_MS, Links
from fullbore.engine.messages import (
    AbortRequest,
    AddRequest,
    DriverSetup,
    EngineDead,
    EngineInfo,
    EngineStats,
    Executed,
    FromStage,
    GetRecords,
    GetStats,
    LoadProgress,
    ModelFound,
    Outputs,
    Ping,
    Pong,
    RecordsReply,
    Rejected,
    Shutdown,
    StopDriver,
    ToDriver,
)
from fullbore.engine.placement import place_model
from fullbore.engine.records import Records
from fullbore.engine.start_up import StartUp, StopAskedError, bring_up, measure, scheduler_config, start_stages
from fullbore.engine.supervisor import StageError, Supervisor
from fullbore.engine.turns import take_short_turns
from fullbore.errors import FullboreError, RequestError
from fullbore.scheduler.micro_batch import MicroBatch
from fullbore.scheduler.request import TokenOutput
from fullbore.scheduler.scheduler import Scheduler

_DRAIN_S = 2.0  # when stopping: micro-batches in flight get this long to come out


class Driver:
    """Serves requests with stages that are up."""

    def __init__(self, info: EngineInfo, links: Links, supervisor: Supervisor, grammars: GrammarQueue) -> None:
        config = info.config
        self.links = links
        self.supervisor = supervisor
        self.grammars = grammars
        links.wait_also_for(grammars)
        self.scheduler = Scheduler(scheduler_config(config, info.num_kv_blocks, info.context_length))
        self.info = info
        self.records = Records(config.pp_size, info.in_flight_limit, time.monotonic_ns())
        self._last_stage = config.pp_size - 1
        self._live: set[int] = set()  # requests whose end the client has not been told
        self._outputs: list[TokenOutput] = []
        self._in_flight: dict[int, MicroBatch] = {}
        self._progress: dict[int, int] = {}  # micro-batch in flight -> stages that are done with it
        self._progress_s = time.monotonic()  # when a micro-batch last got on
        self._stop_at_s: float | None = None  # set: admit nothing; cut what still runs at this time

    def serve(self) -> None:
        """Runs until StopDriver. Raises StageError when the pipeline breaks."""
        while not self._is_stopped():
            self.links.wait(POLL_MS)
            for message in self.links.stage_messages():
                self._take_from_stage(message)
            for request in self.links.client_messages():
                self._take_from_client(request)
            for pending, constraint in self.grammars.finished():
                self._take_compiled(pending, constraint)
            self._expire(time.monotonic())
            self._launch()
            self._hand_out()
            self._look_after_stages()
        self._finish()

    def _take_from_stage(self, message: FromStage) -> None:
        if not isinstance(message, Executed):
            self.supervisor.heard(message)
            return
        record = message.record
        self.records.add_step(record, message.used_graph)
        self.scheduler.observe(record)
        now_s = self._progress_s = time.monotonic()
        if record.stage < self._last_stage:
            if record.micro_batch_id in self._progress:  # a later stage's message may overtake an earlier one's
                self._progress[record.micro_batch_id] = record.stage + 1
        else:
            self._progress.pop(record.micro_batch_id, None)
            token_ids = message.token_ids or []
            self._outputs += self.scheduler.complete(record.micro_batch_id, token_ids, now_s, message.logprobs)
            self._write_down("result", self._in_flight.pop(record.micro_batch_id))

    def _write_down(self, event: str, micro_batch: MicroBatch | None = None) -> None:
        self.records.add_event(self.scheduler.record(event, time.monotonic_ns(), micro_batch))

    def _take_from_client(self, message: ToDriver) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            self._abort(message.request_id)
        elif isinstance(message, GetStats):
            self.links.send(self.stats())
        elif isinstance(message, GetRecords):
            recording = self.records.recording(time.monotonic_ns(), message.seconds, message.since_ns)
            expected_s = self.scheduler.costs.decode_points()
            self.links.send(RecordsReply(msgspec.structs.replace(recording, decode_s=expected_s)))
        elif isinstance(message, Ping):
            self.links.send(Pong())
        elif self._stop_at_s is None:
            self._stop_at_s = time.monotonic() + message.grace_s

    def _add(self, message: AddRequest) -> None:
        if self._stop_at_s is not None:
            self.links.send(Rejected(message.request_id, "The server is shutting down.", None, is_stopping=True))
            return
        constraint = None if message.grammar is None else self.grammars.cached(message.grammar)
        if message.grammar is None or constraint is not None:
            self._enter(message, constraint, time.monotonic())
        else:  # the scheduler hears of it when it can run
            self._live.add(message.request_id)
            self.grammars.add(message, message.grammar, time.monotonic())

    def _take_compiled(self, pending: Pending, constraint: GrammarConstraint | RequestError) -> None:
        if isinstance(constraint, RequestError):
            self._reject(pending.message.request_id, constraint)
        else:
            self._enter(pending.message, constraint, pending.arrival_s)

    def _enter(self, message: AddRequest, constraint: GrammarConstraint | None, arrival_s: float) -> None:
        info = self.info
        try:
            self.scheduler.add(
                make_scheduler_request(message, info.vocab_size, info.eos_token_ids, arrival_s, constraint)
            )
        except RequestError as error:
            self._reject(message.request_id, error)
        else:
            self._live.add(message.request_id)
            self._write_down("arrival")

    def _reject(self, request_id: int, error: RequestError) -> None:
        self._live.discard(request_id)
        self.links.send(Rejected(request_id, str(error), error.param))

    def _abort(self, request_id: int) -> None:
        if self.grammars.remove(request_id):
            self._outputs.append(TokenOutput(request_id, None, "abort"))
            return
        output = self.scheduler.abort(request_id)
        if output is not None:
            self._cut([output])

    def _expire(self, now_s: float) -> None:
        self._outputs += [TokenOutput(request_id, None, "timeout") for request_id in self.grammars.expire(now_s)]
        self._cut(self.scheduler.expire(now_s))

    def _cut(self, ends: list[TokenOutput]) -> None:
        """Takes note of requests that ended before their time."""
        self._outputs += ends
        for _ in ends:
            self._write_down("end")

    def _launch(self) -> None:
        while (micro_batch := self.scheduler.next_micro_batch(time.monotonic())) is not None:
            self.supervisor.send_plan(micro_batch)
            if not self._progress:
                self._progress_s = time.monotonic()
            self._progress[micro_batch.id] = 0
            self._in_flight[micro_batch.id] = micro_batch
            self._write_down("launch", micro_batch)

    def _hand_out(self) -> None:
        if not self._outputs:
            return
        self._live.difference_update(output.request_id for output in self._outputs if output.finish_reason is not None)
        self.links.send(Outputs(self._outputs))
        self._outputs = []

    def _look_after_stages(self) -> None:
        self.supervisor.raise_if_dead()
        limit_s = self.supervisor.step_timeout_s + self.supervisor.stage_timeout_s
        stalled_s = time.monotonic() - self._progress_s
        if self._progress and stalled_s > limit_s:
            oldest = min(self._progress)
            message = f"did not return micro-batch {oldest} within {stalled_s:.0f} s."
            raise self.supervisor.blame(self._progress[oldest], message)

    def _is_stopped(self) -> bool:
        if self._stop_at_s is None:
            return False
        return not self._live or time.monotonic() >= self._stop_at_s

    def _finish(self) -> None:
        """Cuts what still runs, lets the pipeline run dry, and ends the stages."""
        for request_id in sorted(self._live):
            self._abort(request_id)
        self._hand_out()
        end_s = time.monotonic() + _DRAIN_S
        while self._progress and time.monotonic() < end_s:
            self.links.wait(POLL_MS)
            for message in self.links.stage_messages():
                self._take_from_stage(message)
            self.supervisor.raise_if_dead()
        self.supervisor.send(Shutdown())
        self.supervisor.wait_for_exits()

    def stats(self) -> EngineStats:
        state = asdict(self.scheduler.state())
        state["waiting"] += len(self.grammars)
        return EngineStats(
            **state,
            max_in_flight=max(self.records.in_flight_at_launch, default=0),
            in_flight_at_launch=dict(self.records.in_flight_at_launch),
            requests_in_micro_batch=dict(self.records.requests_in_micro_batch),
            stage_busy_s=self.records.stage_busy_s,
            graph_steps=self.records.graph_steps,
            steps_in_bucket=self.records.steps_in_bucket,
        )


# -------------------------------------------------------------------------------------------------------------- main


def run(setup: DriverSetup, links: Links) -> None:
    """From nothing to stopped. Whatever happens, no stage is left."""

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        links.send(LoadProgress(-1, what, done_bytes, total_bytes))
        if any(isinstance(message, StopDriver) for message in links.client_messages()):
            raise StopAskedError  # from within a conversion, say, which then removes what is half done

    placement = place_model(setup.config, report)
    tokenizer_path = setup.config.tokenizer_path or placement.path
    links.send(ModelFound(tokenizer_path))
    supervisor = start_stages(setup.config, placement, setup.run_dir, links)
    try:
        start_up = StartUp(setup.config, links, supervisor)
        grammars = GrammarQueue(GrammarCompiler(tokenizer_path, placement.vocab_size, placement.eos_token_ids))
        driver = Driver(bring_up(setup.config, placement, start_up), links, supervisor, grammars)
        start_up.wait_until(lambda: grammars.is_loaded)
        supervisor.is_serving = True
        report("measuring the stages", 0, 0)
        measure(driver.scheduler.costs, driver.info, start_up)
        gc.collect()
        gc.freeze()
        links.send(driver.info)
        driver.serve()
    finally:
        supervisor.kill()


def main() -> None:
    """Exit code 0 after a stop, otherwise the error's; the client is told why."""
    ignore_terminal_signals()
    take_short_turns()
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=DriverSetup)

    def clean_up() -> None:
        run_dir.remove(setup.run_dir)
        os._exit(1)  # and the system ends the stages with their parent

    look = StoppedParent(setup.client_pid, setup.config.stage_timeout_s).look if setup.has_waiting_clients else None
    ParentWatch(setup.client_pid, clean_up, look).start()
    links = Links(setup.run_dir)
    dead: EngineDead | None = None
    try:
        run(setup, links)
    except StopAskedError:
        pass
    except StageError as error:
        dead = error.dead
    except FullboreError as error:
        dead = EngineDead(str(error), None, "", type(error).__name__, error.exit_code)
    except Exception as error:
        message = f"The engine's driver failed: {type(error).__name__}: {error}"
        dead = EngineDead(message, None, traceback.format_exc())
    if dead is not None:
        links.send(dead)
    links.close()
    sys.exit(0 if dead is None else dead.exit_code)


if __name__ == "__main__":
    main()
