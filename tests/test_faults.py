"""What breaks in a real run, and what then happens: it goes on at full size, or stops with a message and a usable checkpoint; nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from train import finished_checkpoints

from conftest import ROOT
from test_train import SMALL, assert_nothing_left, finish, metrics, until_step

LONG = [*SMALL, "--steps", "12", "--eval-samples", "0"]


class Run:
    """train.py in a directory of its own, whose parts can be found by name."""

    def __init__(self, directory: Path, *flags: str):
        self.marker, self.directory = f"nanomolt-fault-{os.getpid()}-{time.monotonic_ns()}", directory / "runs" / "run"
        self.process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *LONG, *flags, "--name", "run"], cwd=directory, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, env=os.environ | {"MARKER": self.marker})

    def until_step(self, step: int) -> None:
        until_step(self.process, self.directory, step)

    def part(self, name: str) -> psutil.Process:
        """The run's process whose title starts with `name` (ray::Engine, ray::Rank, ray::AgentWorker, VLLM::EngineCore)."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cmdline() and process.cmdline()[0].startswith(name) and process.environ().get("MARKER") == self.marker:
                    found.append(process)
            except psutil.Error:
                continue
        assert found, name
        return found[0]

    def end(self, seconds: float = 240) -> str:
        """The whole output, when it has ended and nothing it started is left."""
        output = finish(self.process, seconds)
        assert_nothing_left(self.marker, 30)
        return output


def whole(run: Run, output: str) -> list[dict]:
    """The steps of a run that went on at full size: every one there, with all its rollouts, and no version skipped."""
    assert run.process.returncode == 0, output
    steps = [row for row in metrics(run.directory) if "reward" in row]
    assert [row["version"] for row in steps] == list(range(1, 13)) and all(row["rollouts"] == 32 for row in steps)
    assert all(row["staleness_max"] <= 1 for row in steps) and "Traceback" not in output
    return steps


@pytest.mark.long
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "ray::Engine"])
def test_a_killed_engine_is_restarted_and_brought_to_the_current_version(tmp_path, name):
    run = Run(tmp_path)
    run.until_step(3)
    run.part(name).kill()
    output = run.end()
    assert whole(run, output)[-1]["engine_restarts"] == 1
    assert "restarting engine 0" in output and "serve version" in output


@pytest.mark.long
def test_one_of_two_engines_dies_and_the_other_goes_on(tmp_path):
    run = Run(tmp_path, "--engines", "2")
    run.until_step(3)
    run.part("VLLM::EngineCore").kill()
    assert whole(run, run.end())[-1]["engine_restarts"] == 1


@pytest.mark.long
def test_an_engine_that_hangs_is_restarted_though_nothing_died(tmp_path):
    """Its process is frozen: whatever waits for it, rollouts or a publish, learns it by a deadline; the engine is made anew and brought to the version."""
    run = Run(tmp_path, "--publish-timeout", "20", "--engine-timeout", "15")
    run.until_step(3)
    run.part("VLLM::EngineCore").send_signal(signal.SIGSTOP)
    output = run.end()
    assert whole(run, output)[-1]["engine_restarts"] >= 1 and ("has not answered for 15 s" in output or "waited 20 s for" in output)


@pytest.mark.long
def test_a_killed_agent_worker_is_restarted_and_its_groups_are_asked_for_again(tmp_path):
    run = Run(tmp_path)
    run.until_step(3)
    run.part("ray::AgentWorker").kill()
    assert sum(row["dropped_groups"] for row in whole(run, run.end())) == 0


@pytest.mark.long
def test_a_killed_trainer_rank_ends_the_run_with_a_usable_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.until_step(4)
    run.part("ray::Rank").kill()
    output = run.end()
    assert run.process.returncode == 1 and "--resume" in output and "Traceback" not in output
    assert [p.name for p in finished_checkpoints(run.directory)] == ["000003"]
    assert json.loads((run.directory / "checkpoints/000003/run.json").read_text())["version"] == 3


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_last_one(tmp_path):
    """As with a full disk: after the checkpoint of step 3 nothing can be created beside it any more (its directory's place is taken by a file)."""
    run = Run(tmp_path)
    run.until_step(4)
    (run.directory / "checkpoints/000006.unfinished").write_text("in the way")
    output = run.end()
    assert run.process.returncode == 1 and "Go on from version 3 with --resume" in output and "Traceback" not in output
    assert [p.name for p in finished_checkpoints(run.directory)] == ["000003"] and "Error" in (run.directory / "error.log").read_text()
