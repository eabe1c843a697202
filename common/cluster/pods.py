"""Pods of Kubernetes: the server of a rank table that a pod is.

Source: MindCluster's description of hccl.json and its rank_table.sh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.cluster.rank_table import RankTable, Server

_NAMES = ("POD_NAME", "HOSTNAME", "POD_IP", "XDL_IP", "POD_UID")
"""Variables with a name of the pod, in the job files of tools/job_files.py and of MindCluster.

XDL_IP is the address of its node.
"""


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
