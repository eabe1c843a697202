"""OneFlow's ``python -m oneflow_gpt.training FLAGS``: train what the flags say, on all devices of
this node that they name.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from common.interrupts import end_at_interrupts

if __name__ == "__main__":
    end_at_interrupts()

from common.systems.flag_scripts import main_with_flags
from common.systems.oneflow.launch import start_nodes_devices
from common.training.stop import end_process
from run_gpt2 import main
from tools.launch import main as launch

if __name__ == "__main__":
    flags = sys.argv[1:]
    start = start_nodes_devices(main, launch, flags)
    end_process(main_with_flags(start, flags, "oneflow_gpt.training"))
