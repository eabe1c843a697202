"""PaddlePaddle's ``python -m paddle.distributed.launch --devices 0,1 tools/train.py -c CONFIG``,
for the scripts of this folder.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from common.systems.fleetx.scripts import launch_command

if __name__ == "__main__":
    command = launch_command(sys.argv[1:])
    os.execv(command[0], command)  # noqa: S606 - no shell
