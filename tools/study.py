"""Run a study: a matrix of runs, measured one after another and compared in a report.

    python tools/study.py --config configs/study/precision.yaml --small
        the variant for two CPU cores, minutes
    python tools/study.py --config configs/study/oneflow_layouts.yaml --plan
        the cells, their ranks, memory and layout; nothing starts
    python tools/study.py --config configs/study/oneflow_layouts.yaml data.train=data/my_document
        the whole of it; any key of the configuration may follow, for all cells
    python tools/study.py --config configs/study/oneflow_layouts.yaml --only devices=1n8d
        the cells for one server of 8
    python tools/study.py --config configs/study/scaling.yaml --hosts a,b --ssh
        cells over several hosts

What comes out is in output/study/NAME: study.json, tables, plots and the report. The same command
resumes a stopped study. repeats=1, warmup_steps=, measured_steps= and time_limit=
change the study's own numbers. In the script of a Slurm job, cells are started with srun. Exit code
0: the study is complete; 2: bad arguments; 1: no cell has finished; 128+n: stopped by signal n.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from common.log import start_log
from common.program import command
from gpt2_study.command import StudyRequest, run_study


@command(StudyRequest)
def main(request: StudyRequest) -> int:
    start_log()
    return run_study(request)
