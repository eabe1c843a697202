"""A program opens each file of its configuration once, and resolves the configuration once."""

import json
import subprocess
import sys
from pathlib import Path

from tests.reference import MERGES, write_vocabulary
from tests.run_scripts import ROOT, clean_environment, run_words

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
LARGE = "configs/gpt2/run_gpt2_13b.yaml"
STUDY = f"""\
title: Opened once
base: {ROOT}/{LARGE}
axes:
  train.recompute: [none, full]
  parallel.model_parallel: [1, 2]
"""
EVAL = f"{ROOT}/compat/fleetx/tools/eval.py"
FLEETX = f"{ROOT}/tests/common/systems/originals/fleetx/eval_gpt_345M_single_card.yaml"
PROGRAM = """
import collections, importlib, json, os, sys
found = []
def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".yaml") and not arguments[2] & os.O_WRONLY:
        opened[os.path.realpath(arguments[0])] += 1
opened, resolved = collections.Counter(), []
sys.addaudithook(note)
from common.resolve import derive
resolve = derive.resolve_config
def counted(config, **options):
    resolved.append(config)
    return resolve(config, **options)
derive.resolve_config = counted
for module, words in json.loads(sys.argv[1]):
    opened.clear(); resolved.clear()
    os.environ["DRY_RUN"] = "1" if module == "tools.launch" else ""
    code = importlib.import_module(module).main(words)
    found.append([code, max(opened.values()), len(opened), len(resolved)])
print(json.dumps(found), file=sys.stderr)
"""


def test_each_file_is_opened_once(tmp_path: Path, corpus_prefix: Path) -> None:
    vocabulary = write_vocabulary(tmp_path / "vocabulary", MERGES)
    run = run_words(
        tmp_path / "run", corpus_prefix, data__tokenizer=vocabulary, train__max_steps=2,
        predict__prompt="ab", model__vocab_size=262,
    )  # fmt: skip
    (tmp_path / "study.yaml").write_text(STUDY)
    own = ["--config", CONFIG, *run, "--run_mode"]
    programs = {
        "train": ("run_gpt2", [*own, "train"]),
        "resume": ("run_gpt2", [*own, "train"]),
        "predict": ("run_gpt2", [*own, "predict"]),
        "plan": ("run_gpt2", ["--config", LARGE, "--run_mode", "plan"]),
        "launch": ("tools.launch", ["distribute", "none", CONFIG, "[0,2]", "train", *run]),
        "mindformer": ("run_mindformer", [*own, "plan"]),
        "fleetx": ("compat.programs", [EVAL, "-c", FLEETX, "--show_config"]),
        "study": ("tools.study", ["--config", f"{tmp_path}/study.yaml", "--plan"]),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps([*programs.values()])]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(zip(programs, json.loads(done.stderr.splitlines()[-1]), strict=True))
    assert {name: row[:2] for name, row in found.items()} == {name: [0, 1] for name in programs}
    files = {name: row[2] for name, row in found.items()}
    assert files == dict.fromkeys(programs, 1) | {"plan": 6, "study": 7, "fleetx": 3}
    resolved = {name: row[3] for name, row in found.items()}
    assert resolved == dict.fromkeys(programs, 1) | {"study": 4, "fleetx": 0}, "a cell each"
