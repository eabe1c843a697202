"""Ranks that end well, fail, die, hang and are stopped: the exit code, the blame, and that nothing is left of them."""

import json
import math
import os
import pty
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, signal_name
from common.launcher import supervisor
from common.launcher.rank_process import Failure, ProcessSpec, RankLog
from common.launcher.supervisor import Job, Outcome, pause, run_attempts, why_not
from tests.common.launcher.started import (
    BEAT,
    FAILS,
    IGNORE,
    NEVER,
    SAVE_AND_LEAVE,
    SLEEP,
    Started,
    children,
    ended_after,
    log,
    until,
)

TELL = (  # its number, in the file that is its first argument
    "import os, pathlib, sys; path = pathlib.Path(sys.argv[1]); part = path.with_suffix('.part');"
    "part.write_text(str(os.getpid())); part.rename(path);"
)


def supervise(folder: Path, ranks: tuple[ProcessSpec, ...], stall_limit: float = NEVER, **options: Any) -> int:
    """Exit code of an attempt with logs in ``folder``."""
    job = Job(children=ranks, log_folder=folder, stall_limit=stall_limit, **options)
    return run_attempts(lambda number: job).code


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    with ended_after() as started:

        def begin(*programs: str, **options: Any) -> Started:
            started.append(Started(tmp_path, children(*programs), **options))
            return started[-1]

        yield begin


def test_all_ranks_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of an earlier run, which would mislead them, are not handed on. Each keeps to its
    cores. The other name of a log is renewed; another program's file of this name stays.
    """
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    show = "import os; print('device', *map(os.environ.get, ('DEVICE_ID', 'MS_ROLE')), *os.sched_getaffinity(0))"
    all_cores = os.sched_getaffinity(0)
    ranks = tuple(
        replace(child, cores=(max(all_cores),), log_link=f"workerlog.{child.rank}") for child in children(show, show)
    )
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "workerlog.0").symlink_to("mf_parallel7/mindformer.log")
    (logs / "workerlog.1").write_text("Paddle's")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    assert supervise(logs, ranks) == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert os.sched_getaffinity(0) == all_cores
    found = [log(logs, rank).splitlines()[1:] for rank in (0, 1)]
    assert found == [[f"device {rank + 4} None {max(all_cores)}"] for rank in (0, 1)]
    assert (logs / "workerlog.0").read_text() == log(logs, 0)
    assert (logs / "workerlog.1").read_text() == "Paddle's"
    said = capfd.readouterr()
    assert "started ranks 0-1" in said.out and str(logs) in said.out
    assert "all ranks ended well" in said.out and said.err == ""


def test_the_first_failure_ends_all_and_what_they_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A grandchild in the same session, and one that has left it and lost its parent."""
    grandchild, daemon = tmp_path / "grandchild", tmp_path / "daemon"
    leave = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
    first = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {TELL + SLEEP!r}, {str(grandchild)!r}])
subprocess.run([sys.executable, "-c", {leave!r}, {TELL + SLEEP!r}, {str(daemon)!r}])
{SLEEP}
"""
    second = f"""
import os, sys, time
while not (os.path.exists({str(grandchild)!r}) and os.path.exists({str(daemon)!r})):
    time.sleep(.01)
print("why")
sys.exit(7)
"""
    assert supervise(tmp_path, children(first, second)) == 7
    assert not is_alive(int(grandchild.read_text()))
    assert not is_alive(int(daemon.read_text()))
    error = capfd.readouterr().err
    assert "rank 1 (device 5) ended with exit code 7" in error
    assert str(tmp_path / "mf_parallel1" / "mindformer.log") in error
    assert "    why\n" in error


def test_a_death_by_signal_goes_before_the_exit_code_1_that_follows_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has ended with 1 before rank 1 is seen dead, as when it notices the closed connection early."""
    first = TELL + "sys.exit(1)"
    second = (
        "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(.01)\npid ="
        " open(sys.argv[1]).read()\nwhile open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z':"
        " time.sleep(.01)\nos.kill(os.getpid(), 9)"
    )
    ranks = children(first, second, arguments=(str(tmp_path / "pid"),))
    assert supervise(tmp_path, ranks) == 137
    error = capfd.readouterr().err
    assert "rank 1 (device 5) was killed by signal 9 (SIGKILL" in error
    assert "rank 0" not in error


def test_the_known_error_that_explains_most_is_named_at_the_end(start: Callable[..., Started], tmp_path: Path) -> None:
    old = tmp_path / "mf_parallel1" / "mindformer.log"
    old.parent.mkdir()
    old.write_text("No space left on device\n")  # of an earlier run
    waits = "print('EI0006: Getting socket times out'); raise SystemExit(1)"
    lacks = "print('RuntimeError: NPU out of memory. Tried to allocate'); raise SystemExit(1)"
    environment = {**os.environ, "LC_ALL": "zh_CN.UTF-8"}
    code, output = start(waits, lacks, env=environment).end()
    assert code == 1
    assert output.count("known error ") == 1
    line = next(line for line in output.splitlines() if line.startswith("known error "))
    assert line.startswith("known error oom.npu: torch_npu 在昇腾设备上分配张量时内存不足。")
    assert line.endswith(f"; python tools/doctor.py --explain {old}")


def test_a_command_that_cannot_be_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = (*children(SLEEP), ProcessSpec(rank=1, command=("/no/such/program",), environment={}))
    assert supervise(tmp_path, ranks) == 1
    assert "rank 1 could not be started: No such file or directory: /no/such/program" in capfd.readouterr().err


def test_the_last_of_stalled_ranks_is_blamed_and_shows_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ahead = BEAT + "beat(3, 'reading data'); beat(3, 'computing'); time.sleep(600)"
    behind = BEAT + "beat(3, 'reading data')\ndef wait_for_the_disk(): time.sleep(600)\nwait_for_the_disk()"
    assert supervise(tmp_path, children(ahead, ahead, behind), stall_limit=2.0) == 1
    error = capfd.readouterr().err
    assert re.search(r"rank 2 \(device 6\) has made no progress .* step 3, reading data", error)
    assert "rank 0" not in error
    assert "in wait_for_the_disk" in error
    # one that never begins, and has not even sent a heartbeat, stalls too
    assert supervise(tmp_path, children("import time; time.sleep(600)"), stall_limit=1.0) == 1
    assert "it has not reached its first step" in capfd.readouterr().err


def test_progress_keeps_a_run_alive(tmp_path: Path) -> None:
    """It continues for twice the limit."""
    program = BEAT + "[(beat(step, 'computing'), time.sleep(.1)) for step in range(40)]"
    assert supervise(tmp_path, children(program), stall_limit=2.0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_every_rank_save(start: Callable[..., Started], number: int) -> None:
    run = start(SAVE_AND_LEAVE, SAVE_AND_LEAVE)
    pids = run.until_ready(2)
    run.process.send_signal(number)
    code, output = run.end()
    assert code == 128 + number
    assert f"stopped by {signal_name(number)}, after" in output
    assert [log(run.folder, rank).count("saved") for rank in (0, 1)] == [1, 1]
    assert not any(map(is_alive, pids))


WAIT = BEAT + "signal.signal(15, lambda *_: 0); print('ready')\nwhile True: time.sleep(600)"


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        ((SAVE_AND_LEAVE, IGNORE), 143, "stopped by SIGTERM; rank 1 did not end within 4 s"),
        ((SAVE_AND_LEAVE, SAVE_AND_LEAVE.replace("143", "9")), 9, "rank 1 (device 5) ended with exit code 9"),
        ((WAIT, SLEEP), 143, "\nstopped by SIGTERM; rank 1 (device 5) ended before it could save"),
    ],
    ids=["does not end", "fails", "cannot save"],
)
def test_a_rank_that_a_stop_does_not_end_well(
    start: Callable[..., Started], programs: tuple[str, ...], code: int, said: str
) -> None:
    run = start(*programs, stall_limit=4.0)
    run.until_ready(2)
    run.process.send_signal(signal.SIGTERM)
    found, output = run.end()
    assert found == code and said in output


def test_a_signal_to_one_rank_lets_the_others_save_too(start: Callable[..., Started], tmp_path: Path) -> None:
    """The ranks agree on it among themselves: the launcher waits, and sends no second signal, which would kill."""
    now = tmp_path / "now"
    second = f"""
import os, signal, sys, time
signal.signal(15, lambda *_: os._exit(9))
while not os.path.exists({str(now)!r}):
    time.sleep(.01)
print("saved")
sys.exit(143)
"""
    run = start("raise SystemExit(143)", second)
    run.until_said("rank 0 (device 4) was stopped by SIGTERM; waiting for the others")
    now.touch()
    assert run.end()[0] == 143
    assert "saved" in log(run.folder, 1)


def test_ranks_and_what_they_started_die_with_a_launcher_that_is_killed(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    """With a heartbeat and, as one that hangs in its imports, without."""
    grandchild = tmp_path / "grandchild"
    first = (
        BEAT + f"import subprocess; subprocess.Popen([sys.executable, '-c', {TELL + SLEEP!r}, {str(grandchild)!r}]);"
    )
    run = start(first + "print('ready'); time.sleep(600)", "import time; print('ready'); time.sleep(600)")
    pids = run.until_ready(2)
    until(grandchild.exists)
    pids.append(int(grandchild.read_text()))
    run.process.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_a_reader_that_takes_nothing_does_not_stop_the_launcher(start: Callable[..., Started]) -> None:
    """Standard output is a pipe that nobody reads, with more to copy than it holds, or full."""
    run = start("print('y' * 6_000_000); raise SystemExit(3)", follow=True)
    assert run.process.wait(timeout=30) == 3
    with Path("/dev/full").open("wb") as full:
        run = start("print('x')\nraise SystemExit(3)", stdout=full, stderr=full, follow=True)
        assert run.process.wait(timeout=30) == 3


def test_on_a_terminal_progress_is_shown_below_what_is_copied(start: Callable[..., Started]) -> None:
    """The line gives way to the next that is copied, and to how the run ended."""
    master, slave = pty.openpty()
    run = start(
        BEAT + "beat(3, 'computing'); print('loss 训', flush=True); time.sleep(600)",
        stdout=slave,
        follow=True,
        steps=40,
    )
    os.close(slave)
    seen = b""
    while b"step 3 of 40, computing" not in seen:
        seen += os.read(master, 4096)
    run.process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 4096):
            seen += chunk
    assert run.process.wait(timeout=30) == 143
    os.close(master)
    assert "loss 训\r\n".encode() in seen
    assert re.search(rb"step 3 of 40, computing\r\x1b\[KSIGTERM: the ranks save", seen)


def test_very_much_output_is_copied_also_to_a_late_reader(start: Callable[..., Started], tmp_path: Path) -> None:
    """A character that was cut by a look waits for its other half."""
    program = f"""
import os, time
os.write(1, "训".encode()[:1])
time.sleep(1.2)
os.write(1, "训".encode()[1:])
print("y" * 30_000_000 + "练 the end", flush=True)
while not os.path.exists({str(tmp_path / "now")!r}): time.sleep(.01)
print("and more", end="")
"""
    run = start(program, "print('not this')", follow=True)
    until(lambda: "the end" in log(tmp_path, 0))
    time.sleep(1.5)  # the launcher looks meanwhile
    out = run.until_said("练 the end\n")
    (tmp_path / "now").touch()
    assert run.end()[1].startswith("and more\nall ranks ended well") and "y" * 30_000_000 in out
    assert "训" in out and "�" not in out and "not this" not in out


def test_hosts_over_ssh_are_named_as_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which launcher ends first is chance, so all may speak before they are ended."""
    programs = (
        "import time; time.sleep(1.5); print('the cause'); raise SystemExit(7)",
        "print('rank 9 failed'); raise SystemExit(7)",
    )
    ranks = tuple(
        replace(child, environment={}, folder=f"host_{name}", title=f"host {name}")
        for name, child in zip("ab", children(*programs), strict=True)
    )
    assert supervise(tmp_path, ranks, stall_limit=math.inf, over_ssh=True) == 7
    said = capfd.readouterr()
    assert f"started host a, host b; logs: {tmp_path}/{{host_a,host_b}}/mindformer.log" in said.out
    assert "error: host b ended with exit code 7" in said.err and "    rank 9 failed\n" in said.err
    assert "also: host a ended with exit code 7" in said.err and "    the cause\n" in said.err
    assert "all hosts were ended; exit code 7" in said.err
    assert " host a\n" in (tmp_path / "host_a" / "mindformer.log").read_text()


def test_logs_are_appended_to_and_only_known_variables_shown(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": "abc1", "SLURM_JWT": "abc2", "db_password": "abc3", "AWS_SECRET": "abc4",
        "MASTER_PASSWORD": "abc6", "MA_IAM_TOKEN": "abc7", "CONDA_API_KEY": "abc8",
        "http_proxy": "http://me:abc5@proxy:80/", "OMP_NUM_THREADS": "two\nlines",
    }  # fmt: skip
    command = (sys.executable, "-c", "print('ran')")
    child = ProcessSpec(rank=0, command=command, environment=secrets)
    (tmp_path / "mf_parallel0").mkdir()
    (tmp_path / "mf_parallel0" / "env.log").touch(0o644)  # is closed to others, as a new one
    for _ in range(2):
        assert supervise(tmp_path, (child,)) == 0
    assert re.fullmatch(r"(==== \S+ rank 0\nran\n){2}", log(tmp_path, 0))
    text = (tmp_path / "mf_parallel0" / "env.log").read_text()
    assert not re.search(r"abc\d", text)
    assert text.count("OMP_NUM_THREADS=two\\nlines\n") == 2
    assert (tmp_path / "mf_parallel0" / "env.log").stat().st_mode & 0o777 == 0o600
    assert text.count(f"# {shlex.join(command)}\n") == len(re.findall("^==== ", text, re.M)) == 2


@pytest.mark.parametrize("pipe", ["", "mindformer.log", "env.log"])
def test_a_log_that_cannot_be_written_starts_nothing(tmp_path: Path, pipe: str) -> None:
    """A file in the place of the folder, or a pipe without a reader in that of a log."""
    if pipe:
        (tmp_path / "mf_parallel1").mkdir()
        os.mkfifo(tmp_path / "mf_parallel1" / pipe)
    else:
        (tmp_path / "mf_parallel1").write_text("in the way")
    with pytest.raises(ConfigError, match=r"mf_parallel1: cannot be written: .*--log_dir"):
        supervise(tmp_path, children(TELL, TELL, arguments=(str(tmp_path / "ran"),)))
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_under_the_logs_does_not_stop_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "mf_parallel0").mkdir()
    for name in ("mindformer.log", "env.log"):
        (tmp_path / "mf_parallel0" / name).symlink_to("/dev/full")
    before = os.stat("/dev/full").st_mode
    assert supervise(tmp_path, children("pass")) == 0
    assert os.stat("/dev/full").st_mode == before  # not made private, as a file of env.log is


def test_a_helper_is_not_waited_for_but_its_failure_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    helper, broken = (replace(child, rank=-1, name="scheduler") for child in children(SLEEP, "raise SystemExit(5)"))
    assert supervise(tmp_path, (*children("pass"), helper)) == 0
    assert (tmp_path / "mf_parallel_scheduler" / "mindformer.log").is_file()
    assert supervise(tmp_path, (*children(SLEEP), broken)) == 5
    assert "scheduler ended with exit code 5" in capfd.readouterr().err


# ---- attempts ----


WORK = f"""{BEAT}
import json
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, last, code = json.loads(sys.argv[1])[number]
for step in range(first, last + 1):
    beat(step, "computing")
print("attempt", number, flush=True)
sys.exit(code)
"""
"""Rank that works on steps and exits, by the triple of its attempt."""


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(folder: Path, attempts: list[tuple[int, int, int]], most: int) -> int:
    ranks = children(WORK, arguments=(json.dumps(attempts),))
    job = Job(children=ranks, log_folder=folder, stall_limit=NEVER)
    return run_attempts(lambda number: job, most=most, folder=folder).code


def test_attempts_until_one_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "pause", lambda failures: failures / 10)
    assert run(tmp_path, [(1, 9, 1), (6, 12, 3), (11, 20, 0)], most=2) == 0
    found = lines(tmp_path)
    names = ("attempt", "first_step", "last_step", "exit_code", "then")
    assert [tuple(line[name] for name in names) for line in found] == [
        (1, 1, 9, 1, "restarted"),
        (2, 6, 12, 3, "restarted"),
        (3, 11, 20, 0, "ended"),
    ]
    assert "rank 0 (device 4) ended with exit code 3" in found[1]["failure"]
    logs = tmp_path / "mf_parallel0"
    for name, number in (("mindformer.log.1", 0), ("mindformer.log.2", 1), ("mindformer.log", 2)):
        text = (logs / name).read_text()
        assert f"attempt {number}\n" in text and text.count("attempt") == 1
    assert "restart 2 of 2 in 0.2 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("attempts", "most", "count", "told"),
    [
        ([(1, 9, 2)], 5, 1, "exit code 2"),
        ([(1, 1, 1)], 5, 1, "before it had finished a step"),
        ([(1, 9, 1), (6, 9, 1)], 5, 2, "step 9 failed twice"),
        ([(1, 9, 1), (6, 10, 1), (6, 11, 1)], 2, 3, "max_restarts=2 restarts are used up"),
        ([(1, 9, 143)], 5, 1, "ended"),
        # a start that fails after steps is tried again once
        ([(1, 9, 1), (6, 6, 1), (6, 20, 0)], 5, 3, "ended"),
        ([(1, 9, 1), (6, 6, 1), (6, 6, 1)], 5, 3, "step 6 failed twice"),
        ([(1, 9, 1)], 0, 0, ""),
    ],
)
def test_failures_that_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[tuple[int, int, int]],
    most: int,
    count: int,
    told: str,
) -> None:
    monkeypatch.setattr(supervisor, "pause", lambda failures: 0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert run(tmp_path, attempts, most) == attempts[-1][2]
    found = lines(tmp_path)
    assert len(found) == count and all(told in line["then"] for line in found[-1:])


def test_a_stuck_terminal_delays_neither_a_restart_nor_a_signal(start: Callable[..., Started], tmp_path: Path) -> None:
    """When it goes on, it says where the rest of the attempt before is."""
    program = (
        BEAT
        + """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    [beat(step, "computing") for step in range(9)]
    print("y" * 30_000_000)
    sys.exit(1)
signal.signal(15, lambda *_: sys.exit(143))
print("z" * 200_000 + "ready")
time.sleep(600)
"""
    )
    run = start(program, follow=True, most=3)
    logs = tmp_path / "mf_parallel0"
    until(lambda: (logs / "mindformer.log.1").exists() and "ready" in log(tmp_path, 0))
    where = f"is in {logs / 'mindformer.log'}; a restart adds a number to that name\n"
    said = run.until_said(where)
    assert said.endswith(f"y\nthe rest of the output {where}")
    assert 10_000_000 < said.count("y") < 30_000_000
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=30) == 143


def test_a_log_that_is_emptied_is_shown_from_its_start(tmp_path: Path) -> None:
    shown = RankLog(tmp_path / "mindformer.log")
    shown.file.write(b"first, and long")
    assert shown.new_output() == "first, and long"
    os.truncate(shown.path, 0)
    shown.file.write(b"second")
    assert shown.new_output() == "second"
    shown.file.close()


@pytest.mark.parametrize("during", ["make_job", "when_met", "attempt"])
def test_signals_are_noted_only_while_the_launcher_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Copies of files before a restart take long, and the handlers before end them."""

    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    def work(name: str, number: int) -> None:
        if number and name == during:
            os.kill(os.getpid(), signal.SIGTERM)

    def make_job(number: int) -> Job:
        work("make_job", number)
        ranks = children(BEAT + "os.kill(os.getppid(), 15); time.sleep(600)" if number else FAILS)
        return Job(children=ranks, log_folder=tmp_path, stall_limit=NEVER, when_met=lambda met: work("when_met", met))

    monkeypatch.setattr(supervisor, "pause", lambda failures: 0.0)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with nullcontext() if during == "attempt" else pytest.raises(Ended):
            assert run_attempts(make_job, most=1, folder=tmp_path).code == 143
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_lost_host_is_waited_for_even_before_the_first_step_and_at_the_same_step() -> None:
    gone = Failure(text="gone", code=1, lost_host=True)
    lost = Outcome(code=1, failure=gone, first_step=5, last_step=5)
    assert why_not(lost, [], 1) == ""
    assert why_not(lost, [lost], 2) == ""
    assert "used up" in why_not(lost, [lost], 1)
    assert [pause(number) for number in (*range(9), 10**6)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
