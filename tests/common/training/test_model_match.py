"""A checkpoint of another model: the words that the error gives, pasted, make the config that fits. Every host compares
the checksums of the checkpoint that it reads, once, and a fault on one rank ends all.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.config.resolved import as_run
from common.errors import CheckpointError
from common.parallel.run import Run
from common.parallel.updates import LossScale
from common.resolve.derive import fitting_vocabulary, resolve_config
from common.run_config import load_config
from common.training import opened_checkpoint
from common.training.opened_checkpoint import Checkpoint
from common.training.start import require_fitting, require_same_model
from tests.common.parallel.test_world import Told

CONFIG = """
output_dir: OUTPUT
model: {num_layers: 4, hidden_size: 192, num_heads: 6, seq_length: 128, vocab_size: 50257}
train: {max_steps: 1, micro_batch_size: 1}
optimizer: {learning_rate: 0.1}
"""
GPT2 = {
    "num_layers": 12, "hidden_size": 768, "num_heads": 12, "seq_length": 1024, "vocab_size": 50257,
    "ffn_hidden_size": 3072, "max_positions": 1024, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def config_of(folder: Path, words: list[str], tokenizer: int | None = None) -> Run:
    file = folder / "config.yaml"
    file.write_text(CONFIG.replace("OUTPUT", str(folder / "run")))
    config = resolve_config(load_config(file, words))
    if tokenizer is None:
        return config
    return as_run(Run, config, model=fitting_vocabulary(config.model, tokenizer, "it"))


def fault_of(model: dict[str, Any], config: Run, **more: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        require_same_model({"config": {"model": model}}, config, Path("output/hf"), **more)
    return str(caught.value)


WRITTEN = [f"model.{key}={value}" for key, value in GPT2.items()]
OURS = GPT2 | dict(num_layers=4, hidden_size=192, num_heads=6, seq_length=128, ffn_hidden_size=768, max_positions=128)


@pytest.mark.parametrize(
    ("model", "words", "given", "tokens"),
    [
        (GPT2, [], "num_layers=12 hidden_size=768 num_heads=12 ffn_hidden_size=3072 max_positions=1024",
         None),
        (GPT2 | {"layer_norm_epsilon": 1e-6}, WRITTEN, "layer_norm_epsilon=1e-06", None),
        (GPT2 | {"activation": "quick_gelu"}, WRITTEN, "activation=quick_gelu", None),
        # every value explicit, as in the config.yaml of a run folder; a window longer than the positions
        (GPT2 | {"max_positions": 64}, WRITTEN, "max_positions=64 seq_length=64", None),
        (OURS | {"vocab_size": 101}, [], "vocab_size=101", None),
        # a padded table as PaddleFleetX's, which a config of 50304 would be cut to
        (OURS | {"vocab_size": 50304}, [], "vocab_size=50304 vocab_multiple=5", 50257),
    ],
)  # fmt: skip
def test_the_words_make_the_config_fit(tmp_path, model, words, given, tokens) -> None:
    """Another window, dropout or multiple is not another model. tokens: of the tokenizer."""
    message = fault_of(model, config_of(tmp_path, words, tokens))
    added = re.findall(r"model\.\w+=\S+", message.partition("add: ")[2])
    assert added == [f"model.{word}" for word in given.split()] and "output_dir" not in message
    config = config_of(tmp_path, [*words, *added, *(["model.seq_length=64"] if words else [])], tokens)
    more = {"dropout": 0.5, "vocab_multiple": 64}
    require_same_model({"config": {"model": model | more}}, config, Path("output/hf"))
    assert config.model.vocab_size == model["vocab_size"]


def test_a_new_size_in_the_same_folder_is_offered_another_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run_2").mkdir()
    message = fault_of(GPT2, config_of(tmp_path, []), may_move=True)
    assert message.startswith(
        "output/hf: holds another model than the config: num_layers is 12 there and 4 in the config, hidden_size"
    )
    assert message.endswith(f"begin in another folder: output_dir={tmp_path}/run_3")


# ---- another tokenizer; hosts that read other files ----


Check = Callable[..., str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = {"kind": "GPT2BPETokenizer", "vocab_size": 9, "sha256": "a" * 64}
    engine = {"optimizer_steps": 0, "loss_scale": {}, "rng": {}}
    manifest = {"state": {"step": 5}, "engine": engine, "config": {}, "tokenizer": tokenizer}
    files = {"model.safetensors": {"w": np.ones(3, np.float32)}}
    return CheckpointWriter(tmp_path, asynchronous=False).save(Snapshot(files=files, manifest=manifest))


def test_another_tokenizer_than_that_of_the_training_is_refused(tmp_path, checkpoint) -> None:
    given = {"kind": "BertWordPieceCase", "vocab_size": 8, "sha256": "b" * 64}
    said = r"with tokenizer GPT2BPETokenizer of 9 tokens \(sha256 a{12}\), the one given is BertWordPieceCase of 8"
    with pytest.raises(CheckpointError, match=f"{checkpoint}: trained {said}.* give the vocabulary files"):
        require_fitting(Checkpoint(checkpoint), "checkpoint.init_from", config_of(tmp_path, []), given)


def test_weights_without_a_run_are_not_resumed(tmp_path: Path, checkpoint: Path) -> None:
    config = config_of(tmp_path, [])
    with pytest.raises(CheckpointError, match="holds only weights, not the state of a run; start over from these"):
        Checkpoint(checkpoint).states(config, LossScale(config.loss_scale))


@pytest.fixture
def check(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """What a rank says of the checkpoint. hosts: a letter for each rank; fault: another rank's."""

    def of(hosts: str, rank: int, fault: str | None = None) -> str:
        def gathered(own: Any) -> list[Any]:
            if own == hosts[rank]:
                return list(hosts)
            return [own, fault] if own is None else [own] * len(hosts)

        monkeypatch.setattr(opened_checkpoint, "_view_of", lambda path: hosts[rank])
        world = Told(rank=rank, size=len(hosts), answer=gathered)
        try:
            opened_checkpoint.check_everywhere(world, Checkpoint(checkpoint))
        except CheckpointError as error:
            return str(error)
        return ""

    return of


@pytest.mark.parametrize(("hosts", "readers"), [("aabb", [2]), ("abab", [1]), ("abcd", [1, 2, 3])])
def test_one_rank_of_each_host_reads(checkpoint: Path, check: Check, hosts: str, readers: Any) -> None:
    """Rank 0 has read its own before. A file is changed, so that who reads it says so."""
    path = checkpoint / "model.safetensors"
    assert [check(hosts, rank) for rank in range(4)] == [""] * 4
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    said = [check(hosts, rank) for rank in range(4)]
    changed = f"{path}: its bytes have changed since it was written (CRC-32); use another checkpoint"
    wanted = [f"rank {rank}: {changed}" if rank in readers else "" for rank in range(4)]
    assert said == wanted
    assert check(hosts, 0, fault=said[readers[0]]) == said[readers[0]]


def test_processes_of_one_host_that_read_the_same_files_see_the_same(checkpoint: Path) -> None:
    before = opened_checkpoint._view_of(checkpoint)
    assert opened_checkpoint._view_of(checkpoint) == before
    copy = checkpoint.parent / "copy"
    copy.write_bytes((checkpoint / "model.safetensors").read_bytes())
    copy.replace(checkpoint / "model.safetensors")
    assert opened_checkpoint._view_of(checkpoint) != before, "as a file mounted over another"
    assert opened_checkpoint._view_of(copy) != opened_checkpoint._view_of(copy), "absent files are nobody's"
