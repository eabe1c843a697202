"""Orders of tools/launch.py to the supervisor. Beside it, the tool waits for tables,
detaches, and speaks through ssh. What it refuses: test_refusals.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.cluster import hccn, rank_table_files
from common.cluster.rank_table_files import read_table
from common.launcher import launch as launching
from common.launcher.supervisor import Job, Outcome
from common.run_config import load_config
from common.run_folder import owned_folder
from tests.cluster_tables import table_1, write_tutorial_table
from tools import launch, launch_container

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/gpt2/run_gpt2_tiny.yaml")
BATCH = "train.global_batch_size=null"
TRAIN = ["none", CONFIG, "[0,2]", "train", BATCH]
ONE = ["none", CONFIG, "[0,1]", "train"]


def distribute(*options: str, words: list[str] = TRAIN) -> int:
    return launch.main(["distribute", *options, *words])


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """The jobs that would have run, without inputs; each ends with exit code 7."""
    found: list[Job] = []

    def run_attempts(make_job: Callable[[int], Job], **_: object) -> Outcome:
        found.append(make_job(0))
        return Outcome(code=7)

    monkeypatch.setattr(launching, "run_attempts", run_attempts)
    monkeypatch.setattr(launch, "check_before_ranks", lambda mode, config: None)
    monkeypatch.chdir(tmp_path)
    # MindSpore sets the last one in the process of another test
    names = "DRY_RUN DETACH MASTER_PORT RANK_TABLE_FILE MS_ROLE OMP_NUM_THREADS HCCL_CONNECT_TIMEOUT"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def filling(tmp_path: Path) -> Path:
    """A table that the platform has not filled."""
    path = tmp_path / "table.json"
    path.write_text('{"status": "initializing"}')
    return path


def devices_of(job: Job) -> list[tuple[int, str]]:
    return [(child.rank, child.environment["DEVICE_ID"]) for child in job.children]


def test_a_job_is_what_the_words_and_the_config_say(jobs: list[Job], tmp_path: Path) -> None:
    more = ["output_dir=here", "runtime.stall_limit=50", BATCH]
    words = ["none", CONFIG, "[2,4]", "train", *more]
    assert distribute(words=words) == distribute("--log_dir", "logs", "--quiet", words=words) == 7
    assert (jobs[0].log_folder, jobs[0].stall_limit) == (tmp_path / "here", 50.0)
    assert (jobs[0].follow, len(jobs[0].hosts.all)) == (True, 1) and jobs[0].children[0].cores
    assert devices_of(jobs[0]) == [(0, "2"), (1, "3")]
    assert jobs[0].steps == load_config(Path(CONFIG)).train.max_steps
    assert (jobs[1].log_folder, jobs[1].follow) == (tmp_path / "logs", False)
    distribute(words=[*words[:3], "eval", *more])
    assert jobs[2].follow, "what an evaluation finds is its output"


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A folder that a run of this process holds."""
    with owned_folder(tmp_path / "here"):
        yield tmp_path / "here"


def test_a_second_run_in_the_same_folder_is_told_why_and_does_not_disturb_the_first(
    jobs: list[Job], held: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAIN, "output_dir=here"]
    before = sorted(held.rglob("*"))
    for kind, more in (
        ("distribute", words),
        ("standalone", [CONFIG, "0", *words[3:]]),
        ("distribute", [*words[:3], "finetune", *words[4:]]),
    ):
        assert launch.main([kind, *more]) == 2
        error = capfd.readouterr().err
        said = "here: another run is writing here; wait for it or choose another folder\n"
        assert error.endswith(said) and error.count("error:") == 1
    with monkeypatch.context() as patch:
        patch.setenv("DETACH", "1")
        assert distribute(words=words) == 2, "not in the background's log alone"
        patch.setenv("DRY_RUN", "1")
        assert distribute(words=words) == 0
    assert jobs == [] and sorted(held.rglob("*")) == before
    two = ["--master", "127.0.0.1:29511", "--nnodes", "2", "--node_rank", "1"]
    assert distribute(*two, words=words) == 7, "it may be its own run's rank 0, on the other host"
    assert distribute(words=[*words[:3], "eval", *words[4:]]) == 7, "reads alone"
    with owned_folder(held.with_name("ended")):
        pass
    assert distribute(words=[*TRAIN, "output_dir=ended"]) == 7, "a run that has ended holds none"


def test_a_table_of_ascends_on_a_machine_without_one(jobs, tmp_path, monkeypatch, capfd) -> None:
    """The cause is named before what follows from it is refused."""
    table = write_tutorial_table(tmp_path / "table.json", servers=1, devices=2)
    keys = ["backend=mindspore", "precision=fp16", "parallel.model_parallel=2"]
    words = [str(table), CONFIG, "[0,2]", "train", *keys]
    cause = "warning: device=auto chose cpu: this machine shows no Ascend (/dev/davinciN)"
    monkeypatch.setattr(hccn, "npu_numbers", lambda: [])
    key = "train.recompute_slice_activation"
    assert distribute(words=[*words, f"{key}=true"]) == 2
    said = capfd.readouterr().err
    assert said.startswith(cause) and key in said.partition("error: ")[2]
    assert distribute(words=[*words, "device=cpu"]) == 7 and cause not in capfd.readouterr().err


def test_full_streams_do_not_prevent_the_start(jobs, monkeypatch) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:  # a flush at the end would fail too
        patch.setattr(sys, "stdout", full)
        patch.setattr(sys, "stderr", full)
        assert distribute(words=[*TRAIN, "parallel.pipeline_stage=2"]) == 7
    assert len(jobs) == 1


def test_variables_of_an_earlier_run_are_not_handed_on(jobs, monkeypatch, capfd) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/old/table.json")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    distribute(words=ONE)
    said = "RANK_TABLE_FILE=/old/table.json of your environment is not used"
    assert said in capfd.readouterr().err
    assert not {"RANK_TABLE_FILE", "MS_ROLE"} & set(jobs[0].children[0].environment)


def test_a_table_that_the_platform_is_filling_is_waited_for(jobs, filling, monkeypatch, capfd) -> None:
    fill = partial(write_tutorial_table, filling, servers=1, devices=2)
    monkeypatch.setattr(rank_table_files.time, "sleep", lambda seconds: fill())
    assert distribute(words=[str(filling), *TRAIN[1:]]) == 7
    assert "waiting up to 1800 s" in capfd.readouterr().err


def test_detached_the_waiting_is_left_to_the_other_process(jobs, filling, monkeypatch, capfd) -> None:
    started: list[list[str]] = []
    child = SimpleNamespace(pid=77)
    monkeypatch.setattr(launching.subprocess, "Popen", lambda command, **_: started.append(command) or child)
    monkeypatch.setenv("DETACH", "1")
    words = ["--log_dir", "logs", str(filling), CONFIG, "[0,2]", "train"]
    assert distribute(words=words) == 0
    assert "process 77, messages in" in capfd.readouterr().out and jobs == []
    assert [command[2:] for command in started] == [["distribute", "--quiet", *words]]
    assert Path("logs/launcher.log").is_file()


@pytest.mark.parametrize(("value", "runs"), [("1", 0), ("yes", 0), ("false", 1), ("No", 1)])
def test_words_that_mean_no(jobs, monkeypatch, value, runs) -> None:
    monkeypatch.setenv("DRY_RUN", value)
    distribute(words=ONE)
    assert len(jobs) == runs


def test_a_dry_run_waits_for_no_table_and_meets_nobody(jobs, filling, monkeypatch, capfd) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert distribute(words=[str(filling), CONFIG, "[0,2]", "train"]) == 2
    assert "'initializing'" in capfd.readouterr().err
    for master, rank in (("127.0.0.1", "RANK=0 "), ("198.51.100.1", "RANK=2 ")):
        assert distribute("--master", f"{master}:29511", "--nnodes", "3") == 0
        assert rank in capfd.readouterr().out
    assert jobs == []


def test_version_0_reaches_the_ranks_as_1(jobs: list[Job], samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json"
    words = [str(source), CONFIG, "[8,16)", "train", "16", BATCH]
    with monkeypatch.context() as patch:
        patch.setenv("DRY_RUN", "1")
        assert distribute("--log_dir", "logs", words=words) == 0 and not Path("logs").exists()
    assert distribute("--log_dir", "logs", words=words) == 7
    path = Path("logs/rank_table.json").absolute()
    written, given = read_table(path), read_table(source)
    assert written.version == "1.0"
    assert [device for _, device in written.places()] == [device for _, device in given.places()]
    assert jobs[0].children[0].environment["RANK_TABLE_FILE"] == str(path)
    servers = [server.server_id for server in given.server_list]
    assert [host.address for host in jobs[0].hosts.all] == servers


def test_over_ssh_each_host_is_a_rank_that_tells_no_progress(jobs: list[Job]) -> None:
    words = ["none", CONFIG, "[0,4)", "train"]
    assert distribute("--hosts", "me@a,b", "--ssh", words=words) == 7
    (job,) = jobs
    assert [child.log_folder for child in job.children] == ["host_me@a", "host_b"]
    assert job.stall_limit == float("inf") and job.over_ssh
    assert [str(child) for child in job.children] == ["host me@a", "host b"]
    command = job.children[1].command
    assert command[2:4] == ("over_ssh", "b") and "--node_rank 1 none" in command[4]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that runs the command on this machine, on a terminal of its own as -tt asks for,
    for any host but ``gone``.
    """
    if shutil.which("script") is None or not Path("/dev/pts/ptmx").exists():
        pytest.skip("no terminal can be made here: script is absent, or /dev/pts is not mounted")
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/bash\n"
        '[ "$1 $2 $3" = "-tt -o BatchMode=yes" ] || exit 99\n'
        'if [ "$4" = gone ]; then echo "ssh: Could not resolve hostname gone" >&2; exit 255; fi\n'
        # script takes the shell from SHELL, which not every environment has
        'SHELL=/bin/bash exec script -qefc "$5" /dev/null\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


def over_ssh(host: str, text: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "tools/launch.py"), "over_ssh", host, text]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]


@pytest.mark.usefixtures("ssh")
def test_the_exit_code_of_the_other_side() -> None:
    for host, text, code in (("a", "exit 3", 3), ("a", "exit 0", 0), ("gone", "exit 0", 255)):
        process = over_ssh(host, text)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == code, output


@pytest.mark.usefixtures("ssh")
def test_a_stop_is_ctrl_c_there() -> None:
    # no child, which bash would wait for before it looks at its trap
    text = "trap 'echo saved; exit 130' INT; echo ready; while :; do read -r -t 1; done"
    process = over_ssh("a", text)
    assert process.stdout is not None
    assert any("ready" in line for line in process.stdout)  # not for ever, where it ends before
    process.send_signal(signal.SIGTERM)
    assert "saved" in process.communicate(timeout=60)[0] and process.returncode == 130


def test_a_list_of_devices_in_place_of_the_range_and_a_rank_table_of_them(jobs, tmp_path, capfd) -> None:
    chips = [{"device_id": each, "device_ip": f"10.0.0.{each}", "rank_id": str(n)} for n, each in enumerate("014")]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(table_1(("127.0.0.1", chips))))
    for option, source in (("0,1,4", "none"), (" 4, 0,1", "none"), ("0,1,4", str(table))):
        assert distribute("--devices", option, words=[source, CONFIG, "train", BATCH]) == 7
    assert devices_of(jobs[0]) == devices_of(jobs[2]) == [(0, "0"), (1, "1"), (2, "4")]
    assert devices_of(jobs[1]) == [(0, "4"), (1, "0"), (2, "1")]
    assert jobs[2].children[2].environment["RANK_TABLE_FILE"] == str(table)
    assert distribute("--devices", "0,1,5", words=[str(table), CONFIG, "train", BATCH]) == 2
    assert "--device_num '[0,3)' --visible_devices 0,1,5" in capfd.readouterr().err


def test_hosts_find_their_own_address_in_a_list(jobs: list[Job]) -> None:
    assert distribute("--node-ips", "198.51.100.1,127.0.0.1") == 7
    assert distribute("--use-rdma", "--num-nodes", "2", "--node_ips", "127.0.0.1,198.51.100.1") == 7
    assert [[child.rank for child in job.children] for job in jobs] == [[2, 3], [0, 1]]
    one, two = (job.children[0].environment for job in jobs)
    assert one["MASTER_ADDR"] == "198.51.100.1"
    assert "NCCL_NET" not in one and two["NCCL_NET"] == "IB"


@pytest.mark.parametrize(("device", "named"), [("cpu", "2, 3"), ("npu", "2 on device 0, 3 on device 1")])
def test_ranks_on_a_cpu_have_no_devices(device, named, monkeypatch, capfd) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    options = ["--nnodes", "2", "--node_rank", "1", "--master", "198.51.100.1:29500"]
    words = ["none", CONFIG, "[0,2)", "train", f"device={device}", BATCH]
    assert distribute(*options, words=words) == 0
    said = capfd.readouterr().out
    assert f": {named}; of 4 in all" in said and said.count("OMP_NUM_THREADS") == 1
    assert "# rank 3: logs in " in said
    assert "; as rank 2 with\nRANK_ID=3 DEVICE_ID=1 RANK=3 LOCAL_RANK=1\n" in said


def test_docker_gets_source_data_and_command(tmp_path, monkeypatch) -> None:
    """OneFlow's own line, with the words that its seed shows."""
    docker, wheel = tmp_path / "docker", tmp_path / "a wheel.whl"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.words"\nexit 7\n')
    docker.chmod(0o755)
    wheel.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = f"--src {tmp_path} --py 3.7 --image gpt2:dev --extra-mount /usr:/data --devices nvidia"
    command = "cd x; bash examples/pretrain_345M.sh"
    more = ["--no-interactive", "--wheel", str(wheel), "--cmd", command]
    assert launch_container.main([*words.split(), *more]) == 7
    given = (tmp_path / "docker.words").read_text().splitlines()
    assert given[:2] == ["run", "--rm"] and "-it" not in given
    assert given[-4:] == ["gpt2:dev", "bash", "-c", f"pip install '{wheel}' && {command}"]
    pairs = [("-v", f"{tmp_path}:{tmp_path}"), ("-v", "/usr:/data"), ("-v", f"{tmp_path}:{tmp_path}:ro")]
    assert {*pairs, ("-w", str(tmp_path)), ("--gpus", "all")} <= {*pairwise(given)}


def test_an_ascend_is_passed_on_device_by_device(monkeypatch, capfd) -> None:
    there = [Path("/dev/davinci10"), Path("/dev/davinci2")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: there)
    assert launch_container.main(["--image", "x", "--devices", "ascend", "--dry-run"]) == 0
    wanted = "--device /dev/davinci2 --device /dev/davinci10 --device /dev/davinci_manager"
    assert wanted in capfd.readouterr().out
