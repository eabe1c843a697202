"""Every command of README and docs runs, and prints what the page shows.

tests/pages/blocks.py reads the pages, printed.py compares output, exemptions.py lists what cannot
run here. The kinds of blocks are explained in CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.config.aliases import ALIASES
from common.config.hints import schema_keys
from common.config.schema import PredictConfig
from common.resolve.derive import resolve_mode
from common.run_config import load_config
from docs.figures.make_figures import FIGURES, FOLDER
from tests.cluster_tables import write_tutorial_table
from tests.pages import exemptions
from tests.pages.blocks import OUTPUT, ROOT, SHOWN, blocks, commands, comparable, pages, read, twin
from tests.pages.inputs import inputs_of, made_by
from tests.pages.printed import missing
from tests.pages.project import Project, Unavailable, copy_project, made_once, make_project, rename_run
from tests.pages.reader import Reader

PAGES = pages()
KINDS = {"bash", "python", "yaml", "json", SHOWN, OUTPUT, ""}
BOTH = ("docs/config_reference.md", "configs/gpt2/README.md")
"""Pages that serve both languages."""
QUICKSTART = "data/quickstart"
FIRST = (
    "python run_gpt2.py --config configs/gpt2/run_gpt2_tiny.yaml --run_mode train"
    f" output_dir=output/first train.max_steps=10 {exemptions.VALIDATION}"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project with the quickstart's data."""
    try:
        return Project(made_once(tmp_path_factory, "prepared", make_project) / "gpt2")
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def trained(prepared: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """It with two runs of the tiny preset, for pages that take them as given."""

    def train(home: Path) -> None:
        project = copy_project(prepared, home)
        project.run(FIRST)
        rename_run(project.folder, "output/first", "output/quickstart")

    return Project(made_once(tmp_path_factory, "trained", train) / "gpt2")


def given_runs(page: str) -> list[str]:
    """The runs that a page uses and does not make."""
    text = read(page).replace("\\\n", " ")
    makes = r"\b(?:train|finetune)\b.*\boutput_dir[=:] ?{}(?![\w/])"
    quick = re.search(r"^bash scripts/quickstart\.sh", text, flags=re.M)
    runs = ["output/first", *["output/quickstart"] * (quick is None)]
    return [run for run in runs if re.search(rf"{run}\b", text) and not re.search(makes.format(run), text)]


def give_chinese(folder: Path, novel: list[str]) -> None:
    """Chapters of a novel as texts to train on and to measure, and titles."""
    for name, texts in (("train", novel[:6]), ("eval", novel[6:])):
        target = folder / "data" / f"{name}.json"
        target.write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    (folder / "data" / "novel.txt").write_text("\n\n".join(novel), encoding="utf-8")
    (folder / "titles.txt").write_text("她\n", encoding="utf-8")


@pytest.fixture
def project(page: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """A copy for one page."""
    fixture = "trained" if given_runs(page) else "prepared"
    copy = copy_project(request.getfixturevalue(fixture), tmp_path / "home")
    if "chinese" in page:
        give_chinese(copy.folder, request.getfixturevalue("chinese"))
    yield copy
    copy.close()


def check_quickstart(project: Project) -> None:
    """It leaves these files."""
    run = project.folder / "output" / "quickstart"
    for name in ("config.yaml", "metrics.jsonl", "loss.png", "checkpoints/latest", "tensorboard"):
        assert (run / name).exists(), name


def check_system(worlds: list[int], made: tuple[str, ...], project: Project) -> None:
    """The plans have the ranks of the system's own files, and the results are where they belong."""
    said = project.printed
    plans = [text for command, text in said.items() if "--run_mode plan" in command]
    assert re.findall(r"^world: (\d+) rank", "".join(plans), flags=re.M) == [*map(str, worlds)]
    for command, text in said.items():
        assert "--show_config" not in command or "in the words of this project" in text
        assert "DRY_RUN" not in command or "# rank " in text
    assert all((project.folder / name).is_file() for name in made)


def check_ascend(project: Project) -> None:
    """The table made of four hosts is the tutorial's; each host starts its ranks. The pasted YAML
    has the tutorial's layout. The first small runs suit an Ascend 910A, which has no bfloat16.
    """
    made, tutorials = project.folder / "hccl_4s_32p.json", project.folder / "tutorial.json"
    assert json.loads(made.read_text()) == json.loads(write_tutorial_table(tutorials).read_text())
    said = project.printed
    of_32 = [command for command in said if "own_13b.yaml" in command and " train 32" in command]
    assert [[int(rank) for rank in re.findall(r"^RANK_ID=(\d+) ", said[command], flags=re.M)] for command in of_32] == [
        list(range(first, first + 8)) for first in (0, 0, 8, 16, 24)
    ], "the first is a look"
    four = [command for command in of_32 if command.startswith("bash")]
    assert [command.split('"')[1] for command in four] == ["[0,8]", "[8,16]", "[16,24]", "[24,32]"]
    assert [command.split()[-1] for command in four] == ["logging.style=mindformers"] * 4
    [plan] = [text for command, text in said.items() if "--run_mode plan" in command]
    assert re.search(r"^time: .* s a step", plan, flags=re.M)
    own = resolve_mode(load_config(project.folder / "configs/gpt2/own_13b.yaml"), "train", world_size=32)
    sizes = own.parallel
    assert (sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage) == (4, 2, 4)
    assert own.train.global_batch_size == 192
    small = [command for command in said if "configs/gpt2/run_gpt2.yaml" in command]
    outputs = set()
    for command, ranks in zip(small, (1, 8), strict=True):
        overrides = [word for word in command.split() if re.match(r"[\w.]+=", word)]
        config = load_config(ROOT / "configs/gpt2/run_gpt2.yaml", overrides)
        config = resolve_mode(config, "train", world_size=ranks)
        found = config.backend, config.device, config.precision.compute
        assert found == ("mindspore", "npu", "float16") and config.loss_scale.initial > 1
        outputs.add(config.output_dir)
    assert len(outputs) == 2, "the second does not go on from the first"


def check_modelarts(project: Project) -> None:
    """The second job resumes the first one on two devices, and the bucket has both logs."""
    *_, last = project.printed.values()
    assert "resuming" in last and "micro 4 x data parallel 2" in last, "the log is rank 0's"
    out = project.folder / "bucket" / "out"
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    logs = [path.parent.name for path in sorted(out.glob("mf_parallel*/mindformer.log"))]
    assert logs == ["mf_parallel0", "mf_parallel1"]


def check_gpt2_chinese(project: Project) -> None:
    """One process, two, and MindSpore have the same losses; texts have the novel's characters."""

    def losses(name: str) -> np.ndarray:
        text = (project.folder / name / "metrics.jsonl").read_text()
        rows = map(json.loads, text.splitlines())
        return np.array([row["loss"] for row in rows if "loss" in row])

    first, two, mindspore = map(losses, ("model", "model_2", "model_ms"))
    assert len(first) == 6 and first[-1] < first[0] - 0.2
    assert np.abs(two - first).max() < 1e-5, "two processes sum in another order"
    assert np.abs(mindspore - first).max() < 1e-4
    novel = json.loads((project.folder / "data" / "train.json").read_text(encoding="utf-8"))
    known = set("".join(novel)) | {*"她 \n"}
    [samples] = [text for name, text in project.printed.items() if "/generate.py" in name]
    texts = re.findall(r"SAMPLE \d =+\n\n(.*?)\n=", samples, flags=re.S)
    assert len(texts) == 2 and all(text.startswith("她") for text in texts)
    assert set("".join(texts)) <= known


def check_preset(project: Project) -> None:
    """Its text begins with the prompt and has no broken characters."""
    [predicted] = [text for name, text in project.printed.items() if "--run_mode predict" in name]
    assert "她" in predicted and "\ufffd" not in predicted


AFTERWARDS: dict[str, Callable[[Project], None]] = {
    "README.md": check_quickstart,
    "docs/ascend.md": check_ascend,
    "docs/from_mindformers.md": partial(check_system, [32, 32, 32], ("own_13b.yaml", "hccl_2s_16p.json")),
    "docs/from_megatron.md": partial(
        check_system, [2, 1], ("../GPT-2_for_PyTorch/own_345m.yaml", "compat/modelzoo/data/my-gpt_text_sentence.idx")
    ),
    "docs/from_paddlefleetx.md": partial(
        check_system, [8, 16, 128], ("own_fleetx.yaml", "data/gpt_en_dataset_text_document_ids.npy")
    ),
    "docs/from_oneflow.md": partial(check_system, [1], ("gpt_sample_dataset_text_document.bin",)),
    "docs/chinese.md": check_preset,
    "docs/from_gpt2_chinese.md": check_gpt2_chinese,
    "docs/modelarts.md": check_modelarts,
}


IN_CAMPAIGN = {
    f"docs/{name}.md"
    for name in (
        "checkpoints", "chinese", "clusters", "compare_runs", "configuration", "data",
        "evaluation", "exports", "first_hour", "from_gpt2_chinese", "from_megatron",
        "from_mindformers", "from_oneflow", "from_paddlefleetx", "generation",
        "hugging_face", "int8", "launching", "layouts", "memory", "metrics", "mindspore",
        "preprocessing", "python", "quantization", "samples", "training",
    )
}  # fmt: skip
"""Pages that take minutes, and whose features other tests of the suite cover."""


def marks_of(page: str) -> tuple[pytest.MarkDecorator, ...]:
    if page in IN_CAMPAIGN:
        return (pytest.mark.campaign,)
    return () if page == "docs/ascend.md" else (pytest.mark.long,)


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PAGES])
def test_the_commands_of_a_page_print_what_it_shows(page: str, project: Project) -> None:
    Reader(page, project, given_runs(page), short=True).go()
    AFTERWARDS.get(page, lambda _: None)(project)


def takes_minutes(page: str) -> bool:
    return any(
        exemptions.shorter(page, command)
        for block in blocks(read(page))
        if block.kind == "bash"
        for command in commands(block)
    )


@pytest.mark.campaign
@pytest.mark.parametrize("page", [page for page in PAGES if takes_minutes(page)])
def test_long_pages_as_they_are_written(page: str, project: Project) -> None:
    """With all their steps, so that each number is compared."""
    Reader(page, project, given_runs(page), short=False).go()
    if page == "README.md":
        again = project.run("bash scripts/quickstart.sh")
        assert "nothing to train" in again and "step 1/750" not in again, "it repeats finished work"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in BOTH])
def test_both_languages_have_the_same_commands_and_outputs(page: str) -> None:
    english, chinese = (
        [comparable(block) for block in blocks(read(name)) if block.kind not in (OUTPUT, "")]
        for name in (page, twin(page))
    )
    assert chinese == english


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    folders = (ROOT, ROOT / "docs", ROOT / "configs" / "gpt2", ROOT / "compat")
    for page in (path for folder in folders for path in folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link, anchor in re.findall(r"\]\((?!\w+://)([^)#]*)#?([^)]*)\)", text):
            target = page.parent / link if link else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, *(twin(page) for page in PAGES if page not in BOTH)])
def test_blocks_paths_presets_and_keys_of_a_page_are_known(page: str) -> None:
    text = read(page)
    found = blocks(text)
    assert {block.kind for block in found} <= KINDS
    assert text.count("```") == 2 * len(found) + sum(b.prints is not None for b in found) * 2
    made = {block.path for block in found}
    for path in re.findall(r"(?<![\w./])(?:compat|containers|configs|tools|scripts)/[\w./]+\w", text):
        folders = (ROOT, *(ROOT / "compat").iterdir())
        exists = any((folder / path).exists() for folder in folders if folder.is_dir())
        assert exists or path in made or path.startswith("configs/gpt2/own_"), path
    for name in re.findall(r"(?<![\w./])(run_gpt2_\w[\w.]*\.yaml)", text):
        assert (ROOT / "configs" / "gpt2" / name).is_file(), name
    known = schema_keys().keys() | ALIASES.keys()
    sections = {key.partition(".")[0] for key in known}
    for key in re.findall(r"(?<![\w.])([a-z_]+\.[a-z_.]+)=", text):
        assert key.partition(".")[0] not in sections or key in known, key


@pytest.mark.parametrize("page", PAGES)
def test_inputs_of_shown_commands_are_there_or_made(page: str, tmp_path: Path) -> None:
    """A reader who types a command that does not run here finds its data: after the quick start,
    after a command of the page, or as files of the reader's own.
    """
    files: dict[str, Path] = {}
    known = {QUICKSTART, f"{QUICKSTART}/small", "output/quickstart"}
    known |= {f"{QUICKSTART}/{tokens}_text_document" for tokens in ("corpus", "small")}
    known |= {*given_runs(page)} | exemptions.OWN.get(page, set())
    for number, block in enumerate(blocks(read(page))):
        if block.path:
            files[block.path] = tmp_path / f"{number}" / Path(block.path).name
            files[block.path].parent.mkdir()
            bases = r"(?m)^(base: )(\S+)$"
            text = re.sub(bases, rf"\1{(ROOT / block.path).parent}/\2", block.text)
            files[block.path].write_text(text, encoding="utf-8")
        for command in commands(block) if block.kind in ("bash", SHOWN) else ():
            if block.kind == SHOWN:
                absent = set(inputs_of(command, files)) - known
                assert not absent, f"{page}:{block.line}: {command}: nothing makes {absent}"
            known |= set(made_by(command))


# ---- what pages hold beside commands: tables for users of other systems, messages, figures ----

SYSTEMS = ("mindformers", "megatron", "paddlefleetx", "oneflow", "nanogpt", "transformers")
STATES = {
    "": ("same", "here as", "planned", "needs devices", "not here"),
    "_zh": ("相同", "换一种写法", "已规划", "需要设备", "没有"),
}
"""First words of a page's last column in each language, in order."""
NO_MESSAGES = {"temperature", "checkpoints/latest", "input should be"}
"""Names in the first column that are not messages, and the start of pydantic's own messages."""


def rows(page: str) -> list[tuple[str, str, str]]:
    """The three cells of each row, titles of groups left out."""
    found = []
    for line in read(f"docs/{page}").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and any(cells[1:]) and not set(cells[0]) <= {"-"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_both_languages_have_the_same_rows_and_say_the_same_of_each(system: str) -> None:
    found = {end: rows(f"from_{system}{end}.md") for end in STATES}
    assert len(found[""]) == len(found["_zh"]) > 9
    for ours, theirs in zip(found[""], found["_zh"], strict=True):
        spans = [sorted(re.findall(r"`([^`]+)`", cells[1])) for cells in (ours, theirs)]
        assert spans[0] == spans[1], f"{ours[0]} | {theirs[0]}"
    states = []
    for end, known in STATES.items():
        words = [re.match(r"\*\*(.+?)\*\*", state) for _, _, state in found[end]]
        states.append([known.index(word[1]) if word else None for word in words])
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ["generation.md", "generation_zh.md"])
def test_the_pages_on_generation_name_keys_of_predict(name: str) -> None:
    keys = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)", read(f"docs/{name}"), flags=re.M)[1:]))
    assert len(keys) == 22 and set(keys) <= PredictConfig.model_fields.keys()


def messages(end: str) -> list[str]:
    """Return the quoted parts of the first column of every table of messages."""
    text = read(f"docs/troubleshooting{end}.md") + read(f"docs/doctor{end}.md")
    text += read(f"docs/clusters{end}.md").rpartition("\n## ")[2]
    cells = re.findall(r"^\| (.*?) \|", text, flags=re.M)
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


def test_the_messages_that_pages_explain_are_in_the_program() -> None:
    folders = ("common", "gpt2_study", "torch_gpt2", "mindformers_gpt2", "tools", "scripts")
    files = [path for name in folders for path in (ROOT / name).rglob("*.[ps][yh]")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a message over several lines
    found = messages("")
    assert len(found) > 30 and messages("_zh") == found
    assert [each for each in found if each not in joined and each not in NO_MESSAGES] == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_script_draws(name: str) -> None:
    drawn = FIGURES[name]().svg()
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn, "run python docs/figures/make_figures.py"


def test_every_figure_is_on_a_page() -> None:
    pages = [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = {Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    assert shown == set(FIGURES) | {"quickstart_loss.png", "plan_accuracy.png"}


# ---- the comparison of outputs ----


PRINTED = """
03:14:55 model: 4 layers x 192, 11,453,760 parameters
03:15:00 step 1/10 | loss 10.8709 | lr 1.000e-04 | 210 tokens/s | 4884 ms | eta 0:00:45
03:15:06 step 2/10 | loss 10.6691 | lr 2.000e-04 | 181 tokens/s | 5654 ms | eta 0:00:41
sample hash b4babda94acf67fe; written to /tmp/x/home/gpt2/output/first/evaluation.json
"""


@pytest.mark.parametrize(
    ("shown", "named"),
    [
        ("12:00:00 step 1/10 | loss 10.90 | lr 1.0e-4 | 1,500 tokens/s | 600 ms | eta 0:00:04", None),
        ("model: ...\n...\nsample  hash 00babda94acf67ff; ... /home/you/first/evaluation.json", None),
        ("model: 4 layers x 192, 11,453,761 parameters", "11,453,761"),
        ("step 1/10 | loss 11.2 | ...", "11.2"),
        ("step 2/10 | ...\nstep 1/10 | ...", "line 2"),
        ("... written to /home/you/gpt2/output/first/other.json", "other.json"),
    ],
)
def test_a_line_that_differs_is_named(shown: str, named: str | None) -> None:
    found = missing(shown, PRINTED)
    assert found is None if named is None else named in (found or "")
    assert missing("step 1/300 | loss 5.1 | ...", PRINTED, any_number=True) is None
