"""scripts/run_distribute.sh and its siblings as a user starts them, most under DRY_RUN=1; and MindSpore's msrun. The
variables of other launchers: tests/common/cluster/test_environment.py. torchrun trains in test_restarts.py.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.command_line import parse_arguments
from common.processes.addresses import free_port
from common.resolve.derive import resolve_mode
from common.run_config import load_config
from tests.cluster_tables import write_tutorial_table
from tests.run_scripts import ROOT, clean_environment, wait_until
from tests.tiny import rows_of, tiny_run

SCRIPTS = ROOT / "scripts"


def shell(line: str, *, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = ["bash", "-c", line], clean_environment(**variables)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def start(
    *words: str, script: str = "run_distribute.sh", cwd: Path = SCRIPTS, **variables: str
) -> subprocess.CompletedProcess[str]:
    return shell(shlex.join(["bash", str(SCRIPTS / script), *words]), cwd=cwd, **variables)


def shown_ranks(text: str) -> list[dict[str, str]]:
    """The variables of each rank; of later ones a dry run shows what differs."""
    first: dict[str, str] = {}
    found = []
    for each in re.split(r"\n# rank \d+: .*\n", text)[1:]:
        words = re.findall(r"^(\S+) \\$", each, re.M) or each.split()
        first = first or dict(word.split("=", 1) for word in words)
        found.append(first | dict(word.split("=", 1) for word in words))
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_tutorial_table(tmp_path / "hccl_4s_32p.json")


@pytest.mark.parametrize(("machine", "numbers"), [(0, "[0,8]"), (1, "[8,16]"), (2, "[16,24]"), (3, "[24,32]")])
def test_the_tutorials_four_commands(table: Path, machine: int, numbers: str) -> None:
    """Commands as its text writes them, run from scripts/, the range not in quotes."""
    line = f"bash run_distribute.sh {table} ../configs/gpt2/run_gpt2_13b.yaml {numbers} train 32"
    done = shell(line, cwd=SCRIPTS, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    common = {"RANK_SIZE": "32", "RANK_TABLE_FILE": str(table), "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    common |= {"MASTER_ADDR": "10.155.111.140", "MASTER_PORT": "29500", "HCCL_CONNECT_TIMEOUT": "1800"}
    for number, found in enumerate(shown_ranks(done.stdout)):
        rank = str(8 * machine + number)
        own = {"RANK_ID": rank, "RANK": rank, "DEVICE_ID": str(number), "LOCAL_RANK": str(number)}
        assert found.items() >= (common | own).items()
    assert len(shown_ranks(done.stdout)) == 8
    assert f"10.155.111.{140 + machine} is not an address of this machine" in done.stderr
    assert not (SCRIPTS / "output").exists()


PROMPT = """predict.prompt=It's "quoted", $HOME and `more` [0,8] * \\ 小"""


def test_relative_words_belong_to_the_current_folder_and_overrides_arrive_unchanged(tmp_path: Path) -> None:
    """The printed command, as a shell reads it."""
    write_tutorial_table(tmp_path / "table.json", servers=1, devices=1)
    shutil.copy(ROOT / "configs/gpt2/run_gpt2_tiny.yaml", tmp_path / "own.yaml")
    done = start("table.json", "own.yaml", "[0,1)", "plan", PROMPT, "seed=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command = next(line for line in done.stdout.splitlines() if "run_gpt2.py" in line)
    assert shell(f"printf '%s\\0' {command}").stdout.split("\0")[:-1] == [
        sys.executable, str(ROOT / "run_gpt2.py"), "--config", str(tmp_path / "own.yaml"),
        "--run_mode", "train", PROMPT, "seed=3",
    ]  # fmt: skip
    assert f"rank table {tmp_path / 'table.json'}: valid" in done.stdout


CONFIG = "../configs/gpt2/run_gpt2_13b.yaml"


def test_bad_words_are_one_message_and_exit_code_2(table: Path) -> None:
    """More of them are in tests/tools/refusals.yaml."""
    for words, message in (
        (
            [str(table), CONFIG, "[0,8]", "trian", "32"],
            "expected train, finetune, eval, predict, serve, export or plan\n",
        ),
        ([str(table), CONFIG, "[0,8]"], "Usage Help: bash run_distribute.sh [RANK_TABLE_FILE]"),
    ):
        done = start(*words)
        assert done.returncode == 2 and done.stdout == "" and message in done.stderr


def test_plan_of_a_cluster(table: Path) -> None:
    words = [str(table), CONFIG, "[0,8]", "plan", "32"]
    done = start(*words)
    assert done.returncode == 0 and done.stderr == ""
    assert "\nworld: 32 ranks = " in done.stdout and "4 hosts, 8 ranks each" in done.stdout
    assert [found["RANK_ID"] for found in shown_ranks(done.stdout)] == ["0", "8", "16", "24"]
    assert re.search(r"\n +31 +\d+ +\d+ +\d+ +10\.155\.111\.143 +7 ", done.stdout)
    assert "warning" not in done.stdout
    every = start("--all_ranks", *words)
    assert [found["RANK_ID"] for found in shown_ranks(every.stdout)] == [str(rank) for rank in range(32)]
    direct = f"$PYTHON run_gpt2.py --config {SCRIPTS / CONFIG} --run_mode plan"
    assert shown_ranks(shell(direct, RANK_TABLE_FILE=str(table)).stdout) == shown_ranks(done.stdout)


def test_hosts_prints_a_command_for_each(table: Path) -> None:
    done = start("--hosts", "a,me@b,c,d", "--no_pinning", str(table), CONFIG, "[0,32]", "train", "32", "seed=1")
    commands = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    for line, numbers in zip(commands, ("[0,8)", "[8,16)", "[16,24)", "[24,32)"), strict=True):
        own = shell(line.replace("env PYTHON", "env DRY_RUN=1 PYTHON"))
        first, last = map(int, re.findall(r"\d+", numbers))
        ranks = [int(found["RANK_ID"]) for found in shown_ranks(own.stdout)]
        assert f"'{numbers}'" in line and ranks == [*range(first, last)]
        assert " seed=1\n" in own.stdout and "on cores" not in own.stdout
    assert re.findall("^# .*", done.stdout, re.M) == ["# host 0: a", "# host 1: me@b", "# host 2: c", "# host 3: d"]


def test_standalone(tmp_path: Path) -> None:
    done = start("../configs/gpt2/run_gpt2_124m.yaml", "3", "train", "seed=1", script="run_standalone.sh", DRY_RUN="1")
    own = {"DEVICE_ID": "3", "RANK_ID": "0", "RANK_SIZE": "1"}
    assert done.returncode == 0 and shown_ranks(done.stdout)[0].items() >= own.items()
    assert "context.device_id=3 seed=1" in done.stdout and "mf_standalone" in done.stdout


@pytest.fixture
def tiny(tmp_path: Path, corpus_prefix: Path) -> Path:
    """A run on CPU whose steps take milliseconds."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 16}
    tree = tiny_run(
        tmp_path / "run", corpus_prefix, model=sizes | {"vocab_size": 101},
        train={"max_steps": 3, "global_batch_size": 4}, optimizer={"learning_rate": 0.01},
        runtime={"threads": 1},
    )  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_detached_ranks_save_when_their_supervisor_is_told_to_stop(tiny: Path, tmp_path: Path) -> None:
    done = start("none", str(tiny), "[0,2)", "train", "train.max_steps=1000000", DETACH="1")
    assert done.returncode == 0, done.stderr
    supervisor = int(re.findall(r"kill (\d+)\n", done.stdout)[0])
    run, log = tmp_path / "run", tmp_path / "run" / "launcher.log"
    try:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(rows_of(run)) > 1, "steps")
    finally:
        os.kill(supervisor, signal.SIGTERM)
    wait_until(lambda: "stopped by SIGTERM" in log.read_text(), "the end")
    step = rows_of(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{step:08}").is_dir()
    assert sorted(path.name for path in run.glob("mf_parallel*")) == ["mf_parallel0", "mf_parallel1"]
    resumed = start("none", str(tiny), "[0,1)", "train", f"train.max_steps={step + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert rows_of(run)[-1]["step"] == step + 1


@pytest.mark.campaign
def test_two_nodes_that_nobody_numbered_train_as_two_ranks_of_one(tiny: Path, tmp_path: Path) -> None:
    """Two nodes on this machine, the second started first, each with a device of its own."""
    meet = ["--master", f"127.0.0.1:{free_port()}", "--nnodes", "2", "--devices"]
    command = ["bash", str(SCRIPTS / "run_distribute.sh"), *meet]
    words = ["none", str(tiny), "train"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": clean_environment()}
    nodes = [
        subprocess.Popen([*command, device, "--log_dir", str(tmp_path / device), *words], **pipes)
        for device in ("0", "3")
    ]
    try:
        told = [node.communicate(timeout=180)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told
    assert sorted(line for text in told for line in text.splitlines() if "ranks of" in line) == [
        "ranks of 127.0.0.1: 0; of 2 in all",
        "ranks of node 1: 1; of 2 in all",
    ]
    assert start("none", str(tiny), "[0,2)", "train", f"output_dir={tmp_path / 'one'}").returncode == 0
    losses = [[row["loss"] for row in rows_of(tmp_path / run)] for run in ("run", "one")]
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def test_closed_streams_do_not_stop_a_run(tiny: Path, tmp_path: Path) -> None:
    line = f"bash {SCRIPTS}/run_distribute.sh none {tiny} '[0,1)' train >&- 2>&- <&-"
    assert [shell(line, DRY_RUN=dry).returncode for dry in ("1", "")] == [0, 0]
    assert "all ranks ended well" not in (tmp_path / "run" / "mf_parallel0" / "mindformer.log").read_text()


def test_an_interpreter_without_the_project_is_one_message(tmp_path: Path) -> None:
    """Environments for all scripts: one that is too old, one without the libraries."""
    old, bare = tmp_path / "old", tmp_path / "bare"
    old.write_text(
        f"#!/bin/bash\nsed 's/sys.version_info <.*/True:/; s/sys.version_info\\[/(3, 9)[/' | exec {sys.executable} -\n"
    )
    bare.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    cases = (
        (old, "it is Python 3.9, expected 3.11 or newer"),
        (bare, "it does not hold the project's libraries: No module named"),
    )
    for python, why in cases:
        python.chmod(0o755)
        for script in ("run_distribute.sh", "run_standalone.sh", "run_slurm.sh", "quickstart.sh"):
            done = start("a", "b", "c", "d", script=script, cwd=ROOT, PYTHON=str(python))
            [message] = done.stderr.splitlines()
            assert done.returncode == 2 and message.startswith(f"error: {python} cannot be used: {why}")
            assert "quickstart.sh" in message


def test_an_active_conda_environment_goes_before_the_repositorys_own(tmp_path: Path) -> None:
    root, conda, venv = tmp_path / "root", tmp_path / "conda", tmp_path / "venv"
    for program in (root / ".venv/bin/pip", root / ".venv/bin/python", conda / "bin/python", venv / "bin/python"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (root / "scripts").mkdir()
    shutil.copy(SCRIPTS / "environment.sh", root / "scripts")

    def found(**variables: str) -> str:
        none = {"PYTHON": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": "", "CONDA_DEFAULT_ENV": ""}
        done = shell(f'source {root}/scripts/environment.sh; find_python; echo "$PYTHON"', **{**none, **variables})
        return done.stdout.strip()

    own = {"CONDA_PREFIX": str(conda), "CONDA_DEFAULT_ENV": "gpt2"}
    assert found() == found(**own | {"CONDA_DEFAULT_ENV": "base"}) == str(root / ".venv/bin/python")
    assert found(**own) == str(conda / "bin/python")
    assert found(**own, VIRTUAL_ENV=str(venv)) == str(venv / "bin/python")


def test_the_exit_code_and_the_last_words_of_a_rank_that_fails(tiny: Path, tmp_path: Path) -> None:
    done = start(str(tiny), "0", "train", "device=npu", script="run_standalone.sh")
    log = tmp_path / "run" / "mf_standalone" / "mindformer.log"
    assert done.returncode == 2 and "device=npu" in done.stderr and str(log) in done.stderr
    assert "npu" in log.read_text() and "RANK_ID=0\n" in (log.parent / "env.log").read_text()


def test_a_refusal_of_rank_0_is_said_once_before_there_are_ranks(tiny: Path, tmp_path: Path) -> None:
    for mode, words, message in (
        ("predict", [], "predict.prompt is not given"),
        ("train", ["data.train=nowhere"], "nowhere.idx: not found"),
    ):
        done = start("none", str(tiny), "[0,2]", mode, *words)
        assert done.returncode == 2 and done.stderr.count(message) == 1, done.stderr
        assert "started" not in done.stdout + done.stderr and not (tmp_path / "run").exists()


def test_slurm_starts_a_task_a_device(tmp_path: Path) -> None:
    """With a stand-in for srun that shows its words, as Slurm is not here; from Slurm's copy of the script."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nprintf \'%s\\0\' "$@" "$SRUN_CPUS_PER_TASK"\n')
    srun.chmod(0o755)
    copy = shutil.copy(SCRIPTS / "run_slurm.sh", tmp_path / "slurm_script")
    line = f"PATH={srun.parent}:$PATH bash {copy} own.yaml train {shlex.quote(PROMPT)}"
    done = shell(line, cwd=tmp_path, SLURM_SUBMIT_DIR=str(ROOT), SLURM_CPUS_PER_TASK="8")
    assert done.stdout.split("\0")[:-1] == [
        "--kill-on-bad-exit=1", sys.executable, str(ROOT / "run_gpt2.py"), "--config", "own.yaml",
        "--run_mode", "train", PROMPT, "8",
    ]  # fmt: skip
    done = shell(line, cwd=tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and "is not the repository" in done.stderr


# ---- msrun itself ----


WHO = """
import os, sys
sys.path.insert(0, os.environ["GPT2_ROOT"])
from common.cluster.environment import find_process, is_scheduler
process = find_process(os.environ)
sys.stdout.write(
    f"{process.rank}/{process.world_size} {process.local_rank}/{process.local_world_size} "
    f"{process.device_id} {process.master}:{process.port} {process.launcher}"
    f"{' scheduler' * is_scheduler(os.environ)}\\n"
)
"""


def test_msrun(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    program = shutil.which("msrun", path=str(Path(sys.executable).parent))
    assert program, "msrun is part of mindspore"
    (tmp_path / "who.py").write_text(WHO)
    port = free_port()
    words = ["--worker_num=2", "--local_worker_num=2", "--log_dir=logs", "--join=True"]
    command = [program, *words, f"--master_port={port}", "who.py"]
    environment = clean_environment(GPT2_ROOT=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    logs = {path.stem: path.read_text().strip() for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        "worker_0": f"0/2 0/2 0 127.0.0.1:{port} msrun",
        "worker_1": f"1/2 1/2 1 127.0.0.1:{port} msrun",
        "scheduler": f"0/2 0/1 None 127.0.0.1:{port} msrun scheduler",
    }


# ---- the quickstart: the commands that it ends with, and the environment that it makes ----


@pytest.mark.parametrize("ending", ["", "_zh"])
def test_the_commands_that_the_quickstart_ends_with(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the quickstart's run and data, and what continues a prompt samples: greedily so
    small a model prints empty lines. Its own settings are those of the preset.
    """
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    text = script.rpartition("cat <<END")[2].partition("END")[0]
    values = dict(re.findall(r"^(CONFIG|RUN|DATA)=(\S+)$", script, flags=re.M))
    values |= {"PYTHON": "python", "OTHER": "ROMEO"}
    text = re.sub(r"\$(\w+)", lambda name: values[name[1]].replace("$ENDING", ending), text)
    file = f"configs/gpt2/run_gpt2_quickstart{ending}.yaml"
    monkeypatch.chdir(ROOT)
    preset = load_config(Path(file))
    text = text.replace(f"{preset.output_dir}/config.yaml", file)  # which holds its values
    found = re.findall(r"run_gpt2\.py (.*)", text)
    assert len(found) == 3
    for words in map(shlex.split, found):
        arguments = parse_arguments(words)
        assert arguments.config is not None
        config = load_config(arguments.config, arguments.overrides)
        config = resolve_mode(config, arguments.run_mode, world_size=1)
        assert config.data.tokenizer == preset.data.tokenizer
        assert config.data.train in (preset.data.train, ["data/own_text_document"])
        assert config.output_dir in (preset.output_dir, "output/own")
        if arguments.run_mode == "predict":
            assert config.predict.method == "sampling" and config.predict.top_k
    assert f"SIZE={preset.model.vocab_size}" in script and preset.data.tokenizer is not None
    assert preset.data.tokenizer.folder == f"data/quickstart{ending}/small"


PIP = f"""#!/bin/bash
case "$*" in
*"pip install"*BAD*) echo "ERROR: No matching distribution found for BAD<3" >&2; exit 1 ;;
*"pip install"*) echo "${{@: -1}}" >>pip.log ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize("bad", ["mindspore", "torch"])
def test_an_extra_without_a_package_is_left_out_and_a_required_one_is_an_error(tmp_path: Path, bad: str) -> None:
    for name in ("scripts/environment.sh", "pyproject.toml", "requirements.txt", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pip", "python"):
        (programs / name).write_text(PIP.replace("BAD", bad))
        (programs / name).chmod(0o755)
    script = "source scripts/environment.sh; use_environment torch fast,mindspore; echo ready"

    command, environment = ["bash", "-euc", script], {"PATH": "/usr/bin:/bin"}
    start = partial(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    done = start()
    if bad == "torch":
        assert done.returncode == 1 and done.stderr.endswith("pip's message is above\n")
        assert "No matching distribution found for torch<3" in done.stderr
        return
    for each in (done, start()):  # the second one tries only what is missing
        assert each.returncode == 0 and each.stdout.endswith("ready\n"), each.stderr
        said = r" No matching distribution found for mindspore<3\n"
        assert re.fullmatch(rf"left out: the extra mindspore, on Python 3\.\d+\.\S+ \S+:{said}", each.stderr), (
            each.stderr
        )
    asked = (tmp_path / "pip.log").read_text().split()
    assert asked == [f"{tmp_path}[torch]", f"{tmp_path}[torch,fast]"]
