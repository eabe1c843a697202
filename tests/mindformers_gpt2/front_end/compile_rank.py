"""One rank's training step through MindSpore's compiler up to the point where a device would be
needed. Writes what the compiler made of it as JSON.

    python compile_rank.py CONFIG.json RANK FOLDER

This process has one CPU, and the compiler splits graphs only for Ascend. So it is told that the
target is Ascend and that there are as many ranks as the layout has: by writing into MindSpore's own
memory, at places that are right for version 2.10.0 and no other. Nothing of this is part of the
product, and a graph that compiles here does not prove that it runs on an Ascend.
"""

import ctypes
import json
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["GLOG_v"] = "4"  # noqa: SIM112
os.environ["MS_DEV_DUMP_IR_PASSES"] = "validate"  # or 150 files of 100 MB are written

import mindspore as ms
import numpy as np
from mindspore.context import ms_ctx_param
from mindspore.graph.api import _cell_graph_executor
from mindspore.ops.operations import comm_ops

from common.config.load import build_config
from common.resolve.derive import resolve_config, written_ranks
from common.resolve.vendor_settings import semi_auto_settings
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.semi_auto.network import TrainingStep, build_network

LIBRARIES = Path(ms.__file__).parent / "lib"
KEPT: list[Any] = []
"""Target that MindSpore's memory points to now."""

COLLECTIVES = re.compile(
    r"= (AllReduce|AllGather|ReduceScatter|AlltoAll\w*|Send|Receive|Broadcast"
    r"|NeighborExchange\w*)\("
)
PARAMETER = re.compile(r"%para\d+_(\S+): <Ref\[Tensor\[(\w+)\]\], \(([\d, ]*)\)")


def say_ascend() -> None:
    """Point the context's device_target, a std::string, at another text."""
    core = ctypes.CDLL(str(LIBRARIES / "libmindspore_core.so"))
    context = ctypes.c_void_p.in_dll(core, "_ZN9mindspore9MsContext13inst_context_E").value
    get = core._ZNK9mindspore9MsContext9get_paramISsEERKT_NS_10MsCtxParamE
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint]
    address = get(context, int(ms_ctx_param.device_target))
    text = b"Ascend"
    # length, capacity, uses: a string of the old ABI
    header = struct.pack("<QQii", len(text), 64, 1 << 20, 0)
    KEPT.append(ctypes.create_string_buffer(header + text + b"\0" * 64))
    ctypes.c_uint64.from_address(address).value = ctypes.addressof(KEPT[-1]) + len(header)


def say_ranks(rank: int, count: int) -> None:
    """Answer for the communication library: in C++ by another table of functions, in Python by other functions."""
    library = ctypes.CDLL(str(LIBRARIES / "libmindspore_common.so"))
    get = library._ZN9mindspore11CommManager11GetInstanceEv
    get.restype = ctypes.c_void_p
    manager = get()
    table = ctypes.c_uint64.from_address(manager).value
    copy = (ctypes.c_uint64 * 16)(*(ctypes.c_uint64 * 16).from_address(table - 16))

    def answer(number: int) -> Any:
        def fill(_this: Any, _group: Any, result: Any) -> bool:
            result[0] = number
            return True

        KEPT.append(
            ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint))(fill)
        )
        return ctypes.cast(KEPT[-1], ctypes.c_void_p).value

    copy[2 + 4], copy[2 + 5] = answer(rank), answer(count)
    KEPT.append(copy)
    ctypes.c_uint64.from_address(manager).value = ctypes.addressof(copy) + 16

    def group_size(group: str = "") -> int:
        match = re.match(r"(\d+)-\d+", group)  # the compiler's own groups are called SIZE-HASH
        return int(match[1]) if match else count

    comm_ops.get_group_size, comm_ops.get_rank = group_size, lambda group="": 0


def collectives(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        found = COLLECTIVES.search(line)
        if not found:
            continue
        ranks = re.search(r"group_rank_ids: \(([\d, ]+)\)", line)
        peer = re.search(r"(?:dest|src)_rank: I64\((\d+)\), group: ", line) or re.search(
            r"src_rank: I64\((\d+)\), group_back", line
        )
        operation = re.search(r'op: "(\w+)"', line)
        yield {
            "operator": found[1],
            "ranks": [int(word) for word in ranks[1].split(", ")] if ranks else None,
            "peer": int(peer[1]) if peer and found[1] in ("Send", "Receive") else None,
            "operation": operation[1] if operation else None,
        }


def main(tree: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    config = build_config(tree)
    world_size = written_ranks(config)
    config = resolve_config(config, world_size=world_size)
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE, save_graphs=2, save_graphs_path=str(folder))
    # the CPU's plugins are loaded while it is still a CPU
    _ = ms.Tensor(np.ones(2, np.float32)) + 1
    ms.set_recursion_limit(config.context.max_call_depth)
    settings = semi_auto_settings(config, rank)
    Path(settings["strategy_ckpt_config"]["save_file"]).parent.mkdir(parents=True, exist_ok=True)
    ms.set_auto_parallel_context(**settings)
    network = build_network(config, MindSporeDevice(kind="npu", index=0, name="Ascend910B2"))
    step = TrainingStep(network, config, rank)
    say_ascend()
    say_ranks(rank, world_size)
    assert config.train.global_batch_size is not None
    ids = ms.Tensor(np.zeros((config.train.global_batch_size, config.model.seq_length), np.int32))
    failure = ""
    try:
        _cell_graph_executor.compile(step, ids, ids, phase="train")
    except Exception as error:
        failure = str(error)
    texts = [path.read_text() for path in sorted(folder.glob("*_validate_*.ir"))]
    if not texts or "Create device context failed" not in failure:
        return {"failure": failure or "compiled, and was not expected to"}
    parameters = {
        match[1]: [int(word) for word in match[3].split(", ") if word] for match in PARAMETER.finditer(texts[-1])
    }
    return {
        "failure": "",
        "parameters": parameters,
        "collectives": list(collectives(texts[-1])),
        "operators": Counter(re.findall(r"= (?:PrimFunc_)?(\w+)\(", texts[-1])),
    }


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), Path(sys.argv[3]))
    Path(sys.argv[3], "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # nothing of what has been bent is to be taken down
