"""Jobs of Kubernetes that run scripts/run_distribute.sh in a pod per node: a Volcano job on Ascend
NPUs, with the ConfigMap of its rank table, and a PyTorchJob. Their texts are in ``templates/``.

Sources: the custom resource definitions of volcano-sh/volcano (config/crd/volcano/bases) and of
kubeflow/training-operator (manifests/base/crds); MindCluster's user guide for labels, annotations
and the ConfigMap of the rank table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

import jinja2

from common.errors import ConfigError
from common.launcher.job_request import ASCEND, JobRequest
from common.processes.addresses import DEFAULT_PORT

_POD_FIELDS = {
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_IP": "status.podIP",
    "XDL_IP": "status.hostIP",
}
_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_BREAKS = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
"""Characters that YAML takes for line ends or refuses."""
_WORDS = re.compile("y|n|yes|no|on|off|true|false|null|nan|inf", re.IGNORECASE)


def job_yaml(job: JobRequest) -> str:
    """Return the YAML of the job. Raises ConfigError for a Volcano job on other devices than Ascend
    NPUs.
    """
    resource = job.device
    if job.kind == "volcano":
        resource = resource or ASCEND
        if not resource.startswith("huawei.com/"):
            raise ConfigError(
                f"--resource {resource}: a Volcano job gets its rank table from Ascend's device"
                f" plugin, expected {ASCEND} or its like; write a PyTorchJob for other devices"
            )
    table = job.rank_table if job.kind == "volcano" else "none"
    amounts = {"cpu": job.cpu, "memory": job.memory, resource: str(job.devices)}
    templates = jinja2.Environment(  # noqa: S701 - YAML, no HTML
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    templates.filters |= {"q": quoted, "literal": _unexpanded}
    values = {
        "job": job,
        "kind": job.kind,
        "resource": resource,
        "table": PurePosixPath(job.rank_table),
        "command": [
            *("bash", "scripts/run_distribute.sh", table, job.config_in_pod),
            *(f"[0,{job.devices})", job.mode, *job.words),
        ],
        "amounts": {name: amount for name, amount in amounts.items() if name and amount},
        "pod_fields": _POD_FIELDS,
        "port": DEFAULT_PORT,
    }
    pod = templates.get_template("pod.yaml.j2").render(values).strip()
    text = templates.get_template(f"{job.kind}.yaml.j2").render(values, pod=pod)
    if text.encode(errors="replace").decode() != text:
        raise ConfigError("a word or a value of the job: expected text in UTF-8")
    return text


def quoted(text: str) -> str:
    """Return a YAML scalar that is this string for any parser.

    Parsers differ in what they take for a number or a truth value, so all but plain words are
    quoted.
    """
    if _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text):
        return text
    escape = json.dumps(text, ensure_ascii=False)
    return _BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", escape)


def _unexpanded(text: str) -> str:
    """Return text in which Kubernetes finds no $(VARIABLE) to replace."""
    return text.replace("$", "$$") if "$(" in text else text
