"""Check this machine before a run.

It checks versions, drivers, devices, ports, names, disk and limits. With ranks, it also runs a real
all-reduce over them.

    python tools/doctor.py
        this machine
    python tools/doctor.py --ranks 8
        and an all-reduce over its devices 0 to 7
    python tools/doctor.py --rank_table hccl_4s_32p.json
        on every server of the table, at about the same time
    python tools/doctor.py --master 10.0.0.1:29500 --nnodes 2 --node_rank 0
        the same without a table
    python tools/doctor.py --explain output/RUN
        what the known errors in these logs (or in one log, or a code) mean, and the next steps

Exit code 0: no errors; 2: errors, or bad arguments; 1: --explain found no known error.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

import os
import sys
from pathlib import Path

from common.doctor.examine import DoctorRequest, examine
from common.doctor.report import as_json, as_table, exit_code
from common.failures import explain_code, explain_log, language_of
from common.program import command


@command(DoctorRequest, stopped="")
def main(request: DoctorRequest) -> int:
    if request.explain is not None:
        language = request.language or language_of(os.environ)
        if os.path.exists(request.explain):
            text, known = explain_log(Path(request.explain), language)
        else:
            text, known = explain_code(request.explain, language), True
        sys.stdout.write(text)
        return 0 if known else 1
    checks = examine(request)
    sys.stdout.write(as_json(checks) if request.json else as_table(checks, colour=sys.stdout.isatty()))
    return exit_code(checks)
