"""Run lm-evaluation-harness with the model ``gpt2_toolkit``; all options are the harness's own.

    python tools/lm_eval.py --model gpt2_toolkit --model_args path=output/first,backend=torch \\
        --batch_size 8 --include_path configs/lm_eval --tasks lambada_local \\
        --metadata '{"lambada": "data/lambada_test.jsonl"}'

path is any folder that holds a model: a run, a checkpoint, an export, a Hugging Face folder.
docs/lm_eval.md has the tasks that need no network. It needs the extra eval. The harness shows
its options with `run --help`.

Exit codes: 0 success, 2 bad input, else the harness's own.
"""

if __name__ == "__main__":
    import as_script  # noqa: F401

from common.paths import require_package
from common.program import command


@command()
def main(words: list[str]) -> None:
    if words in (["--help"], ["-h"], []):
        print(f"usage: lm_eval.py [run | ls | validate] [options]\n\n{__doc__}")
        return
    require_package("lm_eval", extra="eval", purpose="which has the tasks")
    from lm_eval.__main__ import cli_evaluate

    import gpt2_toolkit.lm_eval  # noqa: F401  registers the model

    cli_evaluate()
