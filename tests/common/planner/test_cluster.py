"""The plan of a layout on servers, for layouts whose answer is plain to see."""

import hashlib
import subprocess
import sys
from pathlib import Path

from common.cluster.places import find_places, place_hosts, places_of_table
from common.cluster.rank_environment import make_rendezvous
from common.cluster.rank_table_files import read_table
from common.launcher.jobs import make_children, make_hosts
from common.parallel.topology import Topology
from common.planner.show import layout_warnings, plan_text
from tests.cluster_tables import write_tutorial_table
from tests.common.planner.runs import FOLDER, ROOT, written


def test_layouts_on_servers_of_8(tmp_path: Path) -> None:
    for servers, topology, remark in (
        (4, Topology(data=4, tensor=2, pipeline=4), None),
        (4, Topology(data=2, tensor=8, pipeline=2), None),
        (3, Topology(data=6, tensor=4), None),
        (4, Topology(data=2, tensor=16), "the tensor group of ranks 0-15 lies on 10.155.111.140"),
        (1, Topology(tensor=4, pipeline=2), "pipeline_stage=2 is more than 1 server"),
        (2, Topology(tensor=2, pipeline=8), "pipeline_stage=8 is more than 2 servers"),
        (3, Topology(data=12, pipeline=2), "10.155.111.141 holds ranks of the pipeline stages 0"),
    ):
        table = read_table(write_tutorial_table(tmp_path / f"{servers}.json", servers=servers))
        places = place_hosts(places_of_table(table), "10.155.111.140")
        found = layout_warnings(places, topology)
        assert found == [] if remark is None else len(found) == 1 and found[0].startswith(remark)


def test_the_table_is_told_by_its_sum_and_faults_are_warnings(tmp_path: Path) -> None:
    path = write_tutorial_table(tmp_path / "table.json", servers=1)
    path.write_text(path.read_text().replace("10.155.111.140", "127.0.0.1"))
    file = FOLDER / "run_gpt2_124m.yaml"
    run = written("run_gpt2_124m", "parallel.pipeline_stage=2", "train.micro_batch_size=1")
    variables = {"RANK_TABLE_FILE": str(path), "RANK_SIZE": "8"}
    text = plan_text(run, file, ["seed=7"], variables)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert "warning: pipeline_stage=2 is more than 1 server" in text
    assert "warning: server 127.0.0.1 is a loopback address" in text
    assert text.count("run_gpt2.py") == 1 and text.endswith("--run_mode train seed=7\n")


def test_children_of_the_second_host() -> None:
    places = find_places(range(2), master="127.0.0.1", nodes=2, node_rank=1)
    meeting = make_rendezvous(places, port=4000, table=None, backend="mindspore", environ={})
    children = make_children(places, meeting, ("a", "b"), environ={}, pinned=False)
    found = [(child.rank, child.name, child.cores, child.command) for child in children]
    assert found == [(2, "", (), ("a", "b")), (3, "", (), ("a", "b"))]
    hosts = make_hosts(places, meeting)
    assert hosts is not None and (hosts.own, hosts.port) == (1, 4001)
    of_all = [(host.address, host.ranks) for host in hosts.all]
    assert of_all == [("127.0.0.1", (0, 1)), ("node 1", (2, 3))]


def test_the_host_of_rank_0_starts_mindspores_scheduler_too() -> None:
    places = find_places(range(2))
    meeting = make_rendezvous(places, port=None, table=None, backend="mindspore", environ={})
    folders = [each.log_folder for each in make_children(places, meeting, ("a",), environ={})]
    assert folders == ["mf_parallel0", "mf_parallel1", "mf_parallel_scheduler"]
    assert make_hosts(places, meeting) is None


def test_no_framework_is_loaded_for_a_plan(tmp_path: Path) -> None:
    table = write_tutorial_table(tmp_path / "table.json", servers=4)
    config = FOLDER / "run_gpt2_13b.yaml"
    program = f"""
import sys
for name in ("torch", "mindspore", "deepspeed", "transformers"):
    sys.modules[name] = None
sys.path.insert(0, {str(ROOT)!r})
from tools.launch import main
raise SystemExit(main(["distribute", {str(table)!r}, {str(config)!r}, "[0,8]", "plan", "32",
    "--accelerator=Ascend 910A"]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("fits: ") and done.stderr == ""
    assert ", on Ascend 910A\n" in done.stdout
