"""Pods of Kubernetes: the server of a rank table that a pod is, and the hosts of a PyTorchJob.

Sources: MindCluster's description of hccl.json and its rank_table.sh; pkg/controller.v1/pytorch of
kubeflow/training-operator, envvar.go (1.9, and 1.3 without PET_*).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.processes.addresses import DEFAULT_PORT, is_loopback
from common.whole_numbers import MOST_RANKS, shortened, whole_number

if TYPE_CHECKING:
    from common.cluster.rank_table import RankTable, Server

_NAMES = ("POD_NAME", "HOSTNAME", "POD_IP", "XDL_IP", "POD_UID")
"""Variables with a name of the pod, in the job files of tools/job_files.py and of MindCluster.

XDL_IP is the address of its node.
"""


@dataclass(frozen=True, kw_only=True)
class PodPlace:
    """Hosts of a run, one per pod, as an operator tells them to each pod."""

    nodes: int
    node_rank: int
    address: str
    port: int


def in_pod(environ: Mapping[str, str]) -> bool:
    """Tell whether Kubernetes started this container."""
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def server_of_pod(table: RankTable, environ: Mapping[str, str]) -> Server | None:
    """Return the only server of a table, or the one that carries a name of this pod.

    None outside pods, and if none or several do.
    """
    if not in_pod(environ):
        return None
    if len(table.server_list) == 1:
        return table.server_list[0]
    names = {environ[name] for name in _NAMES if environ.get(name)}
    found = [
        server
        for server in table.server_list
        if not names.isdisjoint((server.server_id, server.address, *server.pod_names))
    ]
    return found[0] if len(found) == 1 else None


def place_of_pod(environ: Mapping[str, str]) -> PodPlace | None:
    """Return the hosts that PyTorchJob or TrainJob tells this pod; None without them or for one.

    PET_NNODES counts pods. Older operators set only WORLD_SIZE, which counts pods too, and RANK.
    Raises ConfigError for an incomplete set, and for an elastic job.
    """
    elastic = environ.get("PET_NNODES", "")
    if ":" in elastic:
        raise ConfigError(
            f"environment: PET_NNODES={shortened(elastic)}: the job is elastic; remove"
            " elasticPolicy from the PyTorchJob: a run has a fixed number of ranks"
        )
    if environ.get("PET_NNODES"):
        count, own = "PET_NNODES", "PET_NODE_RANK" if environ.get("PET_NODE_RANK") else "RANK"
    elif in_pod(environ) and environ.get("MASTER_ADDR") and environ.get("WORLD_SIZE"):
        count, own = "WORLD_SIZE", "RANK"
    else:
        return None
    nodes = _number(environ, count, 1, MOST_RANKS)
    if nodes == 1:
        return None
    address = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR")
    if not address:
        raise ConfigError(
            f"environment: {count}={nodes}, but neither MASTER_ADDR nor PET_MASTER_ADDR is set;"
            " give the PyTorchJob a Master, or the command --master IP:PORT"
        )
    node_rank = _number(environ, own, 0, nodes - 1)
    if node_rank == 0 and is_loopback(address):  # pytorch-operator's pod.go, before 1.3
        address = socket.gethostname()
    port = next((name for name in ("MASTER_PORT", "PET_MASTER_PORT") if environ.get(name)), None)
    return PodPlace(
        nodes=nodes,
        node_rank=node_rank,
        address=address,
        port=DEFAULT_PORT if port is None else _number(environ, port, 1, 65534),
    )


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ.get(name, "")
    number = whole_number(text, most_digits=9)
    if number is None or not least <= number <= most:
        found = f"{name}={shortened(text)}" if text else f"{name} is not set"
        raise ConfigError(f"environment: {found}: expected a number from {least} to {most}")
    return number
