"""Jobs of Kubernetes that run scripts/run_distribute.sh in a pod per node: a Volcano job on Ascend
NPUs, and a PyTorchJob.

Sources: the custom resource definitions of volcano-sh/volcano (config/crd/volcano/bases) and of
kubeflow/training-operator (manifests/base/crds); MindCluster's user guide for labels, annotations
and the ConfigMap of the rank table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from common.errors import ConfigError
from common.launcher.job_request import ASCEND, JobRequest
from common.processes.addresses import DEFAULT_PORT

_GRACE_SECONDS = 600
"""Time between SIGTERM, for which the ranks save, and the end of a pod."""


def volcano_job(job: JobRequest) -> list[dict[str, Any]]:
    """Return the ConfigMap of the rank table and the Job, for Volcano with MindCluster's plugins.

    Raises ConfigError for devices that are not Ascend NPUs.
    """
    resource = job.device or ASCEND
    if not resource.startswith("huawei.com/"):
        raise ConfigError(
            f"--resource {resource}: a Volcano job gets its rank table from Ascend's device plugin,"
            f" expected {ASCEND} or its like; write a PyTorchJob for other devices"
        )
    chip = {"ring-controller.atlas": job.chip}
    table = PurePosixPath(job.rank_table)
    template = _template(
        job,
        resource,
        container="ascend",
        command=_command(job, str(table)),
        labels=chip,
        variables=[
            *(_from_pod(name, field) for name, field in _POD_FIELDS.items()),
            {"name": "RANK_TABLE_FILE", "value": str(table)},
        ],
        volumes=[
            {
                "name": "rank-table",
                "configMap": {
                    "name": f"rings-config-{job.name}",
                    "items": [{"key": "hccl.json", "path": table.name}],
                },
            }
        ],
        mounts=[{"name": "rank-table", "mountPath": str(table.parent)}],
        beside={"volcano.sh/job-name": job.name},
    )
    template["spec"]["restartPolicy"] = "Never"
    labels = {**chip, "fault-scheduling": job.fault_scheduling}
    failed = "RestartJob" if job.restarts else "AbortJob"
    if job.restarts and job.fault_scheduling != "off":
        labels["fault-retry-times"] = str(job.restarts)
        failed = "Ignore"  # MindCluster's scheduler starts the pods again
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"rings-config-{job.name}",
                "namespace": job.namespace,
                "labels": chip,
            },
            "data": {"hccl.json": json.dumps({"status": "initializing"})},
        },
        {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": {"name": job.name, "namespace": job.namespace, "labels": labels},
            "spec": {
                "schedulerName": "volcano",
                "queue": job.queue,
                "minAvailable": job.nodes,
                "maxRetry": job.restarts,
                "policies": [
                    {"event": "PodEvicted", "action": "RestartJob"},
                    {"event": "PodFailed", "action": failed},
                ],
                "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
                "tasks": [{"name": "worker", "replicas": job.nodes, "template": template}],
            },
        },
    ]


_POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_IP": "status.podIP",
    "XDL_IP": "status.hostIP",
}


def pytorch_job(job: JobRequest) -> list[dict[str, Any]]:
    """Return the PyTorchJob: a Master, and a Worker for each further node."""
    template = _template(
        job,
        job.device,
        container="pytorch",  # in which the operator looks for the port
        command=_command(job, "none"),
        labels={},
        variables=[],
        volumes=[],
        mounts=[],
        beside={"training.kubeflow.org/job-name": job.name},
        ports=[{"name": "pytorchjob-port", "containerPort": DEFAULT_PORT}],
    )
    policy = "OnFailure" if job.restarts else "Never"
    counts = {"Master": 1, **({"Worker": job.nodes - 1} if job.nodes > 1 else {})}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name, "namespace": job.namespace},
            "spec": {
                "nprocPerNode": str(job.devices),
                "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": {
                    role: {"replicas": count, "restartPolicy": policy, "template": template}
                    for role, count in counts.items()
                },
            },
        }
    ]


def _command(job: JobRequest, table: str) -> list[str]:
    words = [
        *("bash", "scripts/run_distribute.sh", table, job.config_in_pod),
        *(f"[0,{job.devices})", job.mode, *job.words),
    ]
    return [_unexpanded(word) for word in words]


def _unexpanded(text: str) -> str:
    """Return text in which Kubernetes finds no $(VARIABLE) to replace."""
    return text.replace("$", "$$") if "$(" in text else text


def _template(
    job: JobRequest,
    resource: str | None,
    *,
    container: str,
    command: list[str],
    labels: dict[str, str],
    variables: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
    mounts: list[dict[str, Any]],
    beside: dict[str, str],
    ports: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the template of a pod, of which no two of the job go to one node."""
    amounts = {"cpu": job.cpu, "memory": job.memory, resource: str(job.devices)}
    limits = {name: amount for name, amount in amounts.items() if name and amount is not None}
    own = [{"name": name, "value": _unexpanded(value)} for name, value in job.variables.items()]
    if resource is not None and resource.startswith("huawei.com/"):
        devices = f"metadata.annotations['{resource}']"  # written by the scheduler
        variables = [_from_pod("ASCEND_VISIBLE_DEVICES", devices), *variables]
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
        *volumes,
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, *mounts]  # noqa: S108
    for number, (source, path) in enumerate(job.mounts):
        kind = (
            {"hostPath": {"path": source}}
            if source.startswith("/")
            else {"persistentVolumeClaim": {"claimName": source}}
        )
        volumes.append({"name": f"mount-{number}", **kind})
        mounts.append({"name": f"mount-{number}", "mountPath": path})
    main = {
        "name": container,
        "image": job.image,
        "workingDir": job.workdir,
        "command": command,
        "env": [*variables, *own],
        **({"ports": list(ports)} if ports else {}),
        **({"resources": {"requests": limits, "limits": limits}} if limits else {}),
        "volumeMounts": mounts,
    }
    apart = {"labelSelector": {"matchLabels": beside}, "topologyKey": "kubernetes.io/hostname"}
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {
        **({"metadata": {"labels": labels}} if labels else {}),
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            **(network if job.host_network else {}),
            **({"nodeSelector": job.node_labels} if job.node_labels else {}),
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
            },
            "containers": [main],
            "volumes": volumes,
        },
    }


def _from_pod(name: str, field: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


# ---- YAML ----

_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_BREAKS = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
"""Characters that YAML takes for line ends or refuses."""
_WORDS = re.compile("y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)


def job_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML documents in which every string is one for any parser.

    Parsers differ in what they take for a number or a truth value, so all but plain words are
    quoted.
    """
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines = []
        for key, item in value.items():
            inside = _lines(item)
            if isinstance(item, list | dict) and item:
                lines += [f"{_scalar(key)}:", *("  " + line for line in inside)]
            else:
                lines.append(f"{_scalar(key)}: {inside[0]}")
        return lines
    if isinstance(value, list) and value:
        lines = []
        for item in value:
            first, *others = _lines(item)
            lines += [f"- {first}", *("  " + line for line in others)]
        return lines
    return [_scalar(value)]


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and not _WORDS.fullmatch(value)
        return value if plain else _BREAKS.sub(_escaped, json.dumps(value, ensure_ascii=False))
    return json.dumps(value)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
