"""Files of a folder of parquet, or of one that ``datasets`` of Hugging Face saved.

Source of the layout: ``save_to_disk`` of datasets 5.2: state.json names the .arrow files in the
order of the rows, dataset_dict.json the splits, each a folder of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, DataError
from common.files import reading
from common.structured_files import read_json_mapping

_SPLITS, _STATE = "dataset_dict.json", "state.json"


def files_of(inputs: Sequence[Path], split: str | None) -> list[Path]:
    """Return the inputs with the files of each folder in its place, in the order of their rows.

    split: its name in folders that have splits. Raises DataError for a folder without such files,
    or one that is incomplete. Raises ConfigError for a split that is missing or not there.
    """
    found: list[Path] = []
    has_splits = False
    for path in inputs:
        with reading(path, DataError):
            is_folder = path.is_dir()
        if not is_folder:
            found.append(path)
            continue
        if (path / _SPLITS).exists():
            has_splits = True
            path = _folder_of_split(path, split)
        found += _files(path)
    if split is not None and not has_splits:
        raise ConfigError(f"--dataset-split {split}: no --input is a folder of splits ({_SPLITS}); leave it out")
    return found


def _folder_of_split(folder: Path, split: str | None) -> Path:
    splits = read_json_mapping(folder / _SPLITS, error=DataError).get("splits")
    if not isinstance(splits, list) or not splits:
        raise DataError(f"{folder / _SPLITS}: splits: expected a list of names; save it again")
    if split is None or split not in splits:
        problem = f", not {split!r}" if split else ""
        raise ConfigError(
            f"{folder}: holds the splits {', '.join(map(repr, splits))}{problem}; choose one:"
            f" --dataset-split {splits[0]}"
        )
    return folder / split


def _files(folder: Path) -> list[Path]:
    if (folder / _STATE).exists():
        return _saved_files(folder)
    with reading(folder, DataError):
        found = sorted(path for path in folder.iterdir() if path.suffix == ".parquet" and not path.name.startswith("."))
    if not found:
        raise DataError(
            f"{folder}: is a folder without *.parquet files and without {_STATE}, with which"
            f" datasets saves its own; give its files, for example {folder}/*.txt"
        )
    return found


def _saved_files(folder: Path) -> list[Path]:
    state = folder / _STATE
    saved = read_json_mapping(state, error=DataError)
    if saved.get("_indices_data_files"):
        raise DataError(
            f"{state}: _indices_data_files: the order of the rows is in a file of its own, which"
            " old versions of datasets wrote; load the dataset there and save it again"
        )
    entries = saved.get("_data_files")
    names = [
        entry.get("filename") if isinstance(entry, dict) else None
        for entry in (entries if isinstance(entries, list) else [None])
    ]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(
                f"{state}: _data_files: expected the names of files in this folder; save the"
                " dataset again with save_to_disk"
            )
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: is not there, though {state} names it; copy the folder again")
    return [folder / str(name) for name in names]
