"""The pages for users of other systems: their commands run, and both languages say the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.aliases import ALIASES
from common.config.hints import schema_keys
from tests.run_scripts import clean_environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("coming_from.md", "coming_from_zh.md")
ORIGINALS = ROOT / "tests" / "common" / "systems" / "originals"
STATES = {
    "coming_from.md": ("same", "here as", "planned", "needs devices", "not here"),
    "coming_from_zh.md": ("相同", "换一种写法", "已规划", "需要设备", "没有"),
}
"""How the last column of a page begins, in the same order."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def commands(page: str) -> list[str]:
    """The lines of the bash blocks, continuation lines joined, comments left out."""
    blocks = re.findall(r"```bash\n(.*?)```", text_of(page), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def rows(page: str) -> list[tuple[str, str, str]]:
    """The three cells of each row of the tables of systems, titles of groups left out."""
    found = []
    for line in text_of(page).partition("\n## ")[2].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and any(cells[1:]) and not set(cells[0]) <= {"-"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, beside the folders that a user of each system has."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "gpt2"
    folder.mkdir()
    for name in ("compat", "scripts", "configs", "tools", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_gpt2.py", "run_mindformer.py"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("common", "torch_gpt2", "mindformers_gpt2"):
        (folder / name).symlink_to(ROOT / name)
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
    programs = home / "programs"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    return folder


@pytest.mark.long
def test_every_command_of_the_page(project: Path) -> None:
    """What each shows or writes is there; none of them trains."""
    environment = clean_environment()
    environment["PATH"] = f"{project.parent / 'programs'}:{environment['PATH']}"
    environment["PYTHONPATH"] = ""
    said = {}
    for command in commands(PAGES[0]):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        said[command] = done.stdout
    plans = [text for command, text in said.items() if "--run_mode plan" in command]
    worlds = [re.search(r"^world: (\d+) rank", text) for text in plans]
    assert [int(found[1]) for found in worlds if found] == [32, 32, 32, 2, 1, 8, 16, 128, 1]
    for command, text in said.items():
        assert "--show_config" not in command or "in the words of this project" in text
        assert "DRY_RUN" not in command or "# rank " in text
    for name in (
        "own_13b.yaml", "../GPT-2_for_PyTorch/own_345m.yaml", "own_fleetx.yaml",
        "hccl_2s_16p.json",
        "compat/modelzoo/data/my-gpt_text_sentence.idx",
        "data/gpt_en_dataset_text_document_ids.npy", "gpt_sample_dataset_text_document.bin",
    ):  # fmt: skip
        assert (project / name).is_file(), name


def test_both_languages_have_the_same_commands() -> None:
    assert commands(PAGES[0]) == commands(PAGES[1])
    english, chinese = (rows(page) for page in PAGES)
    assert len(english) == len(chinese) > 80
    for ours, theirs in zip(english, chinese, strict=True):
        spans = [sorted(re.findall(r"`([^`]+)`", cells[1])) for cells in (ours, theirs)]
        assert spans[0] == spans[1], f"{ours[0]} | {theirs[0]}"


def test_both_languages_say_the_same_of_each_row() -> None:
    found = []
    for page in PAGES:
        words = [re.match(r"\*\*(.+?)\*\*", state) for _, _, state in rows(page)]
        found.append([STATES[page].index(word[1]) if word else None for word in words])
    assert found[0] == found[1]


@pytest.mark.parametrize("page", PAGES)
def test_paths_presets_and_keys_of_the_page_exist(page: str) -> None:
    text = text_of(page)
    folders_of_the_project = "compat|containers|configs|tools|scripts"
    for path in re.findall(rf"(?<![\w./])(?:{folders_of_the_project})/[\w./]+\w", text):
        folders = (ROOT, *(ROOT / "compat").iterdir())
        assert any((folder / path).exists() for folder in folders if folder.is_dir()), path
    for name in re.findall(r"(?<![\w./])(run_gpt2_\w[\w.]*\.yaml)", text):
        assert (ROOT / "configs" / "gpt2" / name).is_file(), name
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    known = schema_keys().keys() | ALIASES.keys()
    sections = {key.partition(".")[0] for key in known}
    for key in re.findall(r"(?<![\w.])([a-z_]+\.[a-z_.]+)=", text):
        assert key.partition(".")[0] not in sections or key in known, key
