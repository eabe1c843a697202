"""Two hosts of two ranks each: network namespaces with addresses of their own, one merged rank
table, a cable that is pulled.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network_hosts import ADDRESSES, ip
from tests.run_scripts import ROOT, pids_with, run_words, start_script, wait_until
from tests.system.test_restarts import CONFIG, hosts, rows_of

pytestmark = pytest.mark.campaign


__all__ = ["hosts"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Table as tools/merge_hccl.py writes it. Device addresses stand for the network of Ascend
    devices, which CPUs have none of.
    """
    single = []
    for host, address in enumerate(ADDRESSES):
        devices = [{"device_id": str(n), "device_ip": f"10.78.{host}.{n + 1}", "rank_id": str(n)} for n in range(2)]
        server = {"server_id": address, "device": devices, "host_nic_ip": "reserve"}
        single.append(tmp_path / f"host{host}.json")
        single[-1].write_text(
            json.dumps({"version": "1.0", "server_count": "1", "server_list": [server], "status": "completed"})
        )
    merge = ROOT / "tools" / "merge_hccl.py"
    subprocess.run(
        [sys.executable, str(merge), *map(str, single)], cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    return tmp_path / "hccl_2s_4p.json"


def test_a_host_that_is_cut_off_ends_the_run_on_both_with_the_right_blame_and_the_run_resumes(
    hosts: tuple[str, str], table: Path, tmp_path: Path, corpus_prefix: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    keys = {"train__max_steps": 120, "checkpoint__interval": 20, "validation__interval": 0, "model__dropout": 0.1}

    def start(run: Path, words: tuple[str, ...]) -> list[subprocess.Popen[bytes]]:
        return [
            start_script(*(str(table), CONFIG, numbers, "train", "4",
            *run_words(run, corpus_prefix, **keys), *words),
                         before=("ip", "netns", "exec", host),
                         log=tmp_path / f"{run.name}-{number}.log")
            for number, (host, numbers) in enumerate(zip(hosts, ("[0,2)", "[2,4)"), strict=True))
        ]  # fmt: skip

    processes = start(cut, ())
    try:
        wait_until(lambda: len(rows_of(cut)) > 45, f"steps of {cut}")
        ip("-n", hosts[1], "link", "set", "cable", "down")
        codes = [process.wait(timeout=60) for process in processes]
        assert codes == [1, 1]
        told = [(tmp_path / f"cut-{number}.log").read_text() for number in range(2)]
        for text, other, ranks in zip(told, reversed(ADDRESSES), ("2-3", "0-1"), strict=True):
            assert f"host {other} (ranks {ranks}) has not been heard from" in text, text
        assert pids_with(str(cut)) == []
        stopped = len(rows_of(cut))
        assert 45 < stopped < 120

        ip("-n", hosts[1], "link", "set", "cable", "up")
        processes = start(cut, ())
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        words = run_words(whole, corpus_prefix, **keys)
        processes = [start_script("none", CONFIG, "[0,4)", "train", *words, log=tmp_path / "whole.log")]
        assert processes[0].wait(timeout=120) == 0
    finally:
        for process in processes:
            process.kill()
    assert rows_of(cut) == rows_of(whole)
