"""Environments of other programs, for tests that run them beside ours.

Each is made once, in the folder GPT2_PEERS, else below the temporary folder. It sees the packages
of this environment after its own.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def peer_python(name: str, *requirements: str, **variables: str) -> str:
    """Return the Python of an environment with ``requirements``. variables: of the installation."""
    default = Path(tempfile.gettempdir()) / "gpt2_peers"
    folder = Path(os.environ.get("GPT2_PEERS", default)) / name
    done, python = folder / "done", folder / "bin" / "python"
    wanted = "\n".join(requirements)
    if not done.is_file() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        own = {"base": str(folder), "platbase": str(folder)}
        packages = Path(sysconfig.get_path("purelib", vars=own))
        (packages / "zz_ours.pth").write_text(sysconfig.get_path("purelib"))
        command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        subprocess.run(command, check=True, env={**os.environ, **variables})
        done.write_text(wanted)
    return str(python)
