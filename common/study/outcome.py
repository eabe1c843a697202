"""Tables, pictures and reports that a study leaves for its reader, made from ``study.json``."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.files import atomic_write
from common.study.markup import as_html, as_markdown, table_as_markdown
from common.study.plots import FOLDER, draw, known_pictures
from common.study.report import make_example, make_report
from common.study.results import Study
from common.study.statistics import summarize
from common.study.table import as_csv, main_table
from common.study.verdict import Verdict, judge
from common.study.words import Language

TABLE, SHEET = "table.md", "table.csv"
REPORT, REPORT_ZH, PAGE = "report.md", "report_zh.md", "report.html"
EXAMPLES: dict[str, Language] = {"README.md": "en", "README_zh.md": "zh"}
MOST_EXAMPLE_BYTES = 80_000
"""Size of a picture that is kept beside the documentation."""


def write_outcome(study: Study, folder: Path) -> Verdict:
    """Write tables, pictures and reports of whatever has been found so far into ``folder``.

    Older ones are replaced. Raises StorageError.
    """
    cells, verdict = summarize(study), judge(study)
    pictures = draw(study, cells, verdict, folder)
    report = make_report(study, cells, verdict, pictures)
    table = main_table(study, cells, verdict)
    for name, text in (
        (TABLE, table_as_markdown(table, "en") + "\n"),
        (SHEET, as_csv(study, cells, verdict)),
        (REPORT, as_markdown(report, "en")),
        (REPORT_ZH, as_markdown(report, "zh")),
        (PAGE, as_html(report, folder)),
    ):
        with atomic_write(folder / name, "w") as file:
            file.write(text)
    return verdict


def copy_example(study: Study, folder: Path, target: Path) -> Path:
    """Copy verdict, table and pictures of a study into ``target/NAME`` for the documentation, with
    the date and the machine; commands, paths and the name of the host stay behind. Return the
    folder.

    Raises ConfigError where the folder has no report yet or a picture is too large for the
    repository, and StorageError.
    """
    pictures = sorted((folder / FOLDER).glob("*.png"))
    if not (folder / TABLE).is_file() or not pictures:
        raise ConfigError(f"{folder}: has no report yet; give --report_only too")
    for picture in pictures:
        if (size := picture.stat().st_size) > MOST_EXAMPLE_BYTES:
            raise ConfigError(
                f"{picture}: {size:,} bytes, more than the {MOST_EXAMPLE_BYTES:,} of a picture in"
                " the documentation; take a study of fewer cells"
            )
    report = make_example(study, summarize(study), judge(study), known_pictures(pictures))
    place = target / study.name
    for picture in pictures:
        with atomic_write(place / picture.name) as file:
            file.write(picture.read_bytes())
    for name, language in EXAMPLES.items():
        with atomic_write(place / name, "w") as file:
            file.write(as_markdown(report, language, pictures="."))
    return place
