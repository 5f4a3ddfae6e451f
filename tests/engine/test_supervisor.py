"""Who is to blame: judged on processes that stand for stages."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from fullbore.config import EngineConfig
from fullbore.engine.child import StoppedParent, describe_exit
from fullbore.engine.messages import EngineDead, Heartbeat, StageFailed
from fullbore.engine.supervisor import StageProcess, Supervisor, cores_of_stages


class Stages(Supervisor):
    """Three processes that wait, instead of real stages."""

    def __init__(self, config: EngineConfig) -> None:
        self.stage_timeout_s = config.stage_timeout_s
        self.step_timeout_s = config.step_timeout_s
        self.is_serving = True
        now_s = self._last_check_s = time.monotonic()
        self._first_symptom_s = None
        waiting = [sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline()))"]
        self.stages = [
            StageProcess(stage, subprocess.Popen(waiting, stdin=subprocess.PIPE), None, now_s)  # type: ignore[arg-type]
            for stage in range(3)
        ]

    def exit(self, stage: int, code: int) -> None:
        process = self.stages[stage].process
        process.communicate(b"%d\n" % code)

    def verdict(self, seconds: float = 5.0) -> EngineDead | None:
        """Looks again and again, as the driver does, on a clock of its own."""
        now_s = self._last_check_s
        end_s = now_s + seconds
        while now_s < end_s:
            now_s += 0.1
            for stage in self.stages:
                if stage.process.poll() is None and stage.last_heard_s > 0:
                    stage.last_heard_s = now_s
            dead = self.find_dead(now_s)
            if dead is not None:
                return dead
        return None


@pytest.fixture
def stages() -> Iterator[Stages]:
    stages = Stages(EngineConfig(pp_size=3, stage_timeout_s=2.0, step_timeout_s=10.0))
    yield stages
    stages.kill()
    for stage in stages.stages:
        assert stage.process.stdin is not None
        stage.process.stdin.close()


def lost_neighbour(stage: int) -> StageFailed:
    return StageFailed(stage, f"Stage {stage} lost a neighbour.", "", is_peer_lost=True)


def test_healthy_stages(stages: Stages) -> None:
    assert stages.verdict() is None


def test_killed_stage_wins_over_those_that_lost_it(stages: Stages) -> None:
    stages.heard(lost_neighbour(0))
    stages.heard(lost_neighbour(2))
    stages.stages[1].process.kill()
    stages.stages[1].process.wait()
    dead = stages.verdict()
    assert dead is not None
    assert dead.stage == 1
    assert "was killed by SIGKILL" in dead.message


def test_cause_that_shows_later_still_wins(stages: Stages) -> None:
    stages.heard(lost_neighbour(0))
    assert stages.verdict(seconds=0.3) is None
    stages.heard(StageFailed(1, "Stage 1 failed: broken", "stack", "OutOfMemoryError"))
    assert stages.verdict() == EngineDead("Stage 1 failed: broken", 1, "stack", "OutOfMemoryError")


def test_lost_connection_alone_is_told_in_the_end(stages: Stages) -> None:
    stages.heard(lost_neighbour(2))
    dead = stages.verdict()
    assert dead is not None
    assert dead.message == "Stage 2 lost a neighbour."


def test_exit_without_a_word(stages: Stages) -> None:
    stages.exit(2, 3)
    dead = stages.verdict()
    assert dead is not None
    assert dead.stage == 2
    assert "exited with code 3" in dead.message


def test_silent_stage(stages: Stages) -> None:
    stages.stages[1].last_heard_s = -1e9
    dead = stages.verdict()
    assert dead is not None
    assert dead.stage == 1
    assert "has not answered" in dead.message


def test_silence_is_allowed_while_loading(stages: Stages) -> None:
    stages.is_serving = False
    stages.stages[1].last_heard_s = -1e9
    assert stages.verdict() is None


def test_step_that_takes_too_long(stages: Stages) -> None:
    stages.heard(Heartbeat(1, time.monotonic_ns() - 9_000_000_000))
    assert stages.verdict() is None
    stages.heard(Heartbeat(1, time.monotonic_ns() - 11_000_000_000))
    dead = stages.verdict()
    assert dead is not None
    assert "--step-timeout-s" in dead.message


def test_silence_while_the_driver_slept_proves_nothing(stages: Stages) -> None:
    assert stages.find_dead(stages._last_check_s + 100) is None


def test_a_stage_heard_at_waking_up_gets_no_more_time_than_others(stages: Stages) -> None:
    now_s = stages._last_check_s + 100
    stages.stages[1].last_heard_s = now_s
    assert stages.find_dead(now_s) is None
    assert stages.stages[1].last_heard_s == now_s


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with code 0"), (-signal.SIGSEGV, "was killed by SIGSEGV"), (-63, "was killed by signal 63")],
)
def test_exits_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullbore.engine.supervisor._usable_cores", lambda: [0, 1, 2, 3])
    assert cores_of_stages(2, 1) == [(0,), (1,)]
    assert cores_of_stages(2, 2) == [(0, 1), (2, 3)]
    assert cores_of_stages(6, 1) == [(0,), (1,), (2,), (3,), (0,), (1,)]
    assert cores_of_stages(1, 8) == [(0, 1, 2, 3)]


def test_a_parent_stopped_alone_is_ended(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        parent = StoppedParent(process.pid, limit_s=4.0)

        def look_for(seconds: float, pause_s: float = 0.5) -> bool:
            """Whether it is ended meanwhile."""
            nonlocal now_s
            for _ in range(int(seconds / pause_s)):
                now_s += pause_s
                parent.look()
            return "was stopped (SIGSTOP)" in capfd.readouterr().err

        assert not look_for(10)
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            pass
        assert not look_for(60, pause_s=10), "this process was stopped, too"
        assert not look_for(3)
        assert look_for(3)
        assert process.wait() == -signal.SIGKILL
