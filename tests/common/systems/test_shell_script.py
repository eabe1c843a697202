"""Scripts of other systems as flags: what is followed, and what only a shell knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.systems.flags import read_command

SCRIPT = """#!/bin/bash
# Runs a small model
GPUS_PER_NODE=4; NNODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
export MICRO=$(( ((((((WORLD_SIZE)))) - 2)) / 3 ))
DATA="0.3 ${ROOT:-data}/a 0.7 data/b"; BLEND=$DATA
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE \\
             --nnodes $NNODES"
MODEL=(
    --num-layers 24 --hidden-size 1024  # the sizes
    --save "my folder"
)
SEED=(1 2); SEED=3; LAST=$SEED; LAST=7
MODEL+=(--seed $LAST)
cat <<'THE-END'
options=" \\
    --data-path ${BLEND} \\
    --micro-batch-size $MICRO "
cat <<EOT > ds.json
{ "steps": '$(date) }
EOT
OUT=`pwd`/log
if [ -n "$1" ]; then SIZE=$1; else SIZE=2; fi
"""
EXPECTED = [
    "--num-layers", "24", "--hidden-size", "1024", "--save", "my folder", "--seed", "7",
    "--data-path", "0.3", "data/a", "0.7", "data/b", "--micro-batch-size", "2",
]  # fmt: skip


COMMANDS = {
    "launcher": 'torchrun $DISTRIBUTED pretrain_gpt.py "${MODEL[@]}" $@ $options 2>&1 | tee "$OUT"',
    "lines": """CUDA=0 python -m torch.distributed.launch $DISTRIBUTED $OUT/pretrain_gpt.py \\
        "${MODEL[@]}" \\
        ${options} &> $OUT &
wait""",
    "sh -c": """run="python pretrain_gpt.py --num-layers 24 --hidden-size 1024 \\
        --save 'my folder' --seed 7 ${options}"
srun -l --output=$OUT sh -c "${run}"
""",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_scripts_are_followed(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT + command)
    assert read_command(file) == (str(file), "pretrain_gpt.py", EXPECTED)


def test_a_script_that_doubles_a_variable_ends(tmp_path) -> None:
    (tmp_path / "run.sh").write_text("A=ab\n" + "A=$A$A\n" * 60 + "python a.py --x $A")
    with pytest.raises(ConfigError, match=r"run.sh:2\d: the values of variables are longer"):
        read_command(tmp_path / "run.sh")


@pytest.mark.parametrize("branch", ["pretrain_gpt.py --lr 1", "tools/other.py x"])
def test_a_condition_that_chooses_the_command_is_refused(branch, tmp_path) -> None:
    text = f"if x; then\npython pretrain_gpt.py --lr 2\nelse\npython {branch}\nfi"
    (tmp_path / "run.sh").write_text(text)
    if "other" in branch:
        assert read_command(tmp_path / "run.sh")[2] == ["--lr", "2"]
        return
    with pytest.raises(ConfigError, match="a condition says which of several commands starts"):
        read_command(tmp_path / "run.sh")
