"""Goes through a page as a reader does: runs its commands and compares what they print."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import yaml

from common.run_config import load_config
from tests.pages import exemptions
from tests.pages.blocks import ROOT, SHOWN, Block, blocks, commands, read
from tests.pages.printed import missing
from tests.pages.project import Project
from tests.reference import MERGES, save_model, write_vocabulary

TINY = ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml"


class Reader:
    """A page, block by block. given: the runs that it finds. short: with few steps."""

    def __init__(self, page: str, project: Project, given: list[str], *, short: bool) -> None:
        self.page, self.project, self.short = page, project, short
        self.python: list[str] = []
        self.differ = {"output/quickstart"} if "output/quickstart" in given else set()
        """Runs that have fewer steps than on the page."""
        self.written: dict[str, Block] = {}

    def go(self) -> None:
        for block in blocks(read(self.page)):
            printed, any_number = "", False
            if block.kind == "bash":
                for command in commands(block):
                    printed += self.command(command)
                    any_number |= self.differs(command)
            elif block.kind == SHOWN:
                printed = "".join(map(self.shown, commands(block)))
            elif block.kind == "python":
                printed, any_number = self.script(block), self.differs(block.text)
            elif block.kind == "yaml":
                self.config(block)
            elif block.kind == "json":
                json.loads(block.text)
            if block.prints is not None and block.kind != SHOWN:
                self.compare(block, block.prints, printed, any_number)
        ran = " ".join(self.project.printed)
        for path in self.written:
            assert path in ran, f"{self.page}: no command uses {path}"

    def compare(self, block: Block, expected: str, printed: str, any_number: bool) -> None:
        added = any(exemptions.VALIDATION in self.shorter(command) for command in commands(block))
        free = r"validation|perplexity" if added and exemptions.VALIDATION not in block.text else ""
        problem = missing(expected, printed, any_number=any_number, free=free)
        assert problem is None, (
            f"{self.page}:{block.line}: the page shows what is not printed; {problem}\nprinted:\n{printed[-6000:]}"
        )

    def differs(self, command: str) -> bool:
        """Whether its numbers follow from a run that was shortened."""
        return any(re.search(rf"\b{run}\b", command) for run in self.differ) or (
            self.short and exemptions.shorter(self.page, command) is not None
        )

    def command(self, command: str) -> str:
        if "--run_mode serve" in command:
            self.project.serve(command)
            return ""
        if not installed(command):
            return ""
        return self.project.run(command, changed=self.shorter(command))

    def shorter(self, command: str) -> str:
        """The command with the words that make it short."""
        if not self.short:
            return command
        if entry := exemptions.shorter(self.page, command):
            self.differ.update(filter(None, [entry.run]))
            return f"{command.replace(*entry.replaced)} {entry.words}"
        if any(path in command for path in self.written):
            return command
        trains = re.search(r"(run_gpt2\.py|run_distribute\.sh|run_standalone\.sh)", command)
        validates = re.search(r"\b(train|finetune|eval)\b", command)
        if trains and validates and "DRY_RUN" not in command and "max_samples" not in command:
            return f"{command} {exemptions.VALIDATION}"
        return command

    def script(self, block: Block) -> str:
        """Run a block of Python after the earlier ones of the page, whose names it may use."""
        elsewhere = rf"^(?:import|from) {exemptions.SCRIPTS_ELSEWHERE}\b"
        if re.search(elsewhere, block.text, flags=re.M):
            compile(block.text, f"{self.page}:{block.line}", "exec")
            return ""
        before = "\n".join(self.python)
        quiet = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec({before!r})\n"
        self.python.append(block.text)
        return self.project.run_python((quiet if before else "") + block.text)

    def config(self, block: Block) -> None:
        """Write a file of the page; check a part of one as a change of the tiny preset."""
        if block.path:
            file = self.project.folder / block.path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            self.written[block.path] = block
            return
        file = self.project.folder / "part_of_a_page.yaml"
        tree = {"base": str(TINY), **yaml.safe_load(block.text)}
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        load_config(file)

    def shown(self, command: str) -> str:
        """Check a command that does not run here as far as it can be."""
        config = re.search(r"--config (\S+)", command)
        if "--run_mode serve" in command and config and (self.project.folder / config[1]).is_file():
            self.project.serve(command)
            return ""
        if self.project.server is not None and command.startswith("curl "):
            return self.project.run(command)
        if found := re.search(r"^hf download \S+ --local-dir (\S+)|hf://\S+", command):
            vocabulary = write_vocabulary(self.project.folder / "gpt2_vocabulary", MERGES)
            folder = found[1] or "model_by_name"  # with a small model in place of GPT-2
            save_model(self.project.folder / folder, vocabulary, 262)
            command = re.sub(r"hf://\S+", folder, command)
        if exemptions.runs_elsewhere(command):
            return ""
        if exemptions.shorter(self.page, command):
            return self.project.run(command, changed=self.shorter(command))
        words = shlex.split(command)
        [program] = [word for word in words if re.search(r"[\w/]\.(py|sh)$", word)][:1] or [""]
        if program.endswith(".sh"):
            return self.project.run(command, changed=f"export DRY_RUN=1; {command}")
        assert program, f"{self.page}: {command}: list it in tests/pages/exemptions.py"
        if program.startswith("tools/"):
            said = self.project.run(f"python {program} --help")
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            unknown = given - set(re.findall(r"--[\w-]+", said))
            assert not unknown, f"{self.page}: {command}: {program} has no {sorted(unknown)}"
            return ""
        start = shlex.join(words[words.index(program) :])
        if program.startswith("compat/"):
            return self.project.run(command, changed=f"python {start} --show_config")
        plan = re.sub(r"--run_mode[= ]\w+", "", start) + " --run_mode plan"
        size = str(exemptions.world_size(command))
        return self.project.run(command, changed=f"python {plan}", WORLD_SIZE=size, RANK="0")


def installed(command: str) -> bool:
    """Whether the framework or package that a command names is there."""
    needed = {"mindspore": r"mindspore|mindrecord", "deepspeed": "deepspeed", "lm_eval": "lm_eval"}
    return all(
        importlib.util.find_spec(package) is not None for package, words in needed.items() if re.search(words, command)
    )
