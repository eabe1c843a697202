"""Write the file of a Kubernetes job that trains on several nodes.

    python tools/job_files.py volcano --name gpt2-13b --image registry.example/gpt2:cann \\
            --nodes 4 --devices 8 --config configs/gpt2/run_gpt2_13b_dp4_mp8.yaml \\
            --mount gpt2-code:/job/code --mount gpt2-data:/job/data --output gpt2-13b.yaml
        a Volcano job on Ascend 910, with the ConfigMap into which MindCluster writes the rank table
    python tools/job_files.py pytorchjob --name gpt2-124m --image registry.example/gpt2:cuda \\
            --nodes 2 --devices 4 --config configs/gpt2/run_gpt2_124m.yaml \\
            --mount gpt2-code:/job/code output_dir=/job/code/output/pods
        a PyTorchJob of Kubeflow's training operator, on GPUs or other devices

Each node runs scripts/run_distribute.sh in a pod, which finds out which node it is. The
configuration is checked for these nodes first. section.key=value words at the end go to every rank.
Submit the file by kubectl apply -f FILE.

Exit codes: 0 written, 1 the file could not be written, 2 an option or the configuration is at
fault.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import sys
from pathlib import PurePosixPath

from common.files import atomic_write
from common.launcher.job_files import JobRequest, job_yaml
from common.program import command
from common.resolve.derive import resolve_mode
from common.run_config import load_config


@command(JobRequest)
def main(job: JobRequest) -> None:
    text = f"# kubectl apply -f FILE; written by tools/job_files.py\n{job_yaml(job)}"
    config = load_config(job.config, list(job.words))
    resolve_mode(config, job.mode, world_size=job.nodes * job.devices)
    if job.output is None:
        print(text, end="")
    else:
        with atomic_write(job.output, "w") as file:
            file.write(text)
        print(f"wrote {job.output}: kubectl apply -f {job.output}", file=sys.stderr)
    output_dir = PurePosixPath(job.workdir) / str(config.output_dir)
    if not any(output_dir.is_relative_to(path) for _, path in job.mount):
        print(
            f"warning: output_dir={output_dir} is not below a --mount, so checkpoints end with the"
            " pod and nodes do not share it; set output_dir=PATH below one",
            file=sys.stderr,
        )
