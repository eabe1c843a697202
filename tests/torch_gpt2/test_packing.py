"""Documents that share a window on torch: Megatron's own masks, each document by itself in
transformers' model, and what leaks from one document to another.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.backends import make_run
from common.dataset.sampler import Batch
from common.evaluation.rows import ScoredRow, score_rows
from common.parallel.run import Run
from common.run_config import load_config
from common.training.metrics import read_metrics
from common.training.start import Start
from tests.packed_corpus import EOD, FLAGS, write_packed_corpus
from tests.reference import hugging_face_model, hugging_face_names
from tests.tiny import rows_of, tiny_config, tiny_run, train_here
from torch_gpt2.data import BlockAttention, document_mask, document_numbers, document_positions, split
from torch_gpt2.device import TorchDevice, select_device
from torch_gpt2.engine import Engine
from torch_gpt2.evaluate import evaluate, make_scorer
from torch_gpt2.model import GPT2, Attention
from torch_gpt2.parallel.layout import build_parts
from torch_gpt2.parallel.world import World

LENGTH, CPU = 24, select_device("cpu")
KEYS = [key for key in FLAGS if key != "data__eod_id"]


def make_config(**changes: Any) -> Run:
    return tiny_config(**({"model__num_heads": 2, "model__seq_length": LENGTH} | FLAGS | changes))


def make_model(config: Run) -> GPT2:
    [model] = build_parts(config, CPU, World())
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def windows() -> Tensor:
    """(4, LENGTH + 1): documents in the middle, EOD at both ends and twice, one EOD, and none."""
    tokens = torch.randint(8, 101, (4, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    for row, places in ((0, (5, 11, 17)), (1, (0, 7, 8, 23, 24)), (2, (12,))):
        tokens[row, list(places)] = EOD
    return tokens


def documents(ids: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the row and the columns of each document."""
    for number, row in enumerate(ids.tolist()):
        ends = [place + 1 for place, token in enumerate(row) if token == EOD]
        for first, end in pairwise(sorted({0, *ends, len(row)})):
            yield number, slice(first, end)


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
def test_masks_and_positions_are_megatrons() -> None:
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    config = make_config()
    ids, targets = split(windows(), config.packing)
    seen = document_mask(document_numbers(ids, EOD))
    for row, data in enumerate(ids):
        hidden, counted, positions = megatron._get_ltor_masks_and_position_ids(data, EOD, True, True, True, True)
        assert torch.equal(document_positions(ids, EOD)[row], positions)
        assert torch.equal(~seen[row], hidden)
        assert torch.equal((targets[row] >= 0).float(), counted)
    assert config.packing is not None
    assert config.packing.counted(windows().int().numpy()) == int((targets >= 0).sum())


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> BlockAttention:
    """flex_attention, whose kernels need CUDA; its operators compute gradients on a CPU too, if they are let."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    return BlockAttention(fused=False)


PATHS: dict[str, dict[str, Any]] = {
    "fused": {},
    "recomputed": {"train__recompute": "full"},
    "written out": {"precision": {"softmax": "bfloat16"}},
    "blocks": {},
    "blocks recomputed": {"train__recompute": "selective"},
}


def model_of(path: str, blocks: BlockAttention, **changes: Any) -> GPT2:
    model = make_model(make_config(**PATHS[path], **changes))
    if path.startswith("blocks"):
        model.blocked = blocks
        for module in model.modules():
            if isinstance(module, Attention):
                module.blocked = blocks
    return model


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", [path for path in PATHS if path != "written out"])
@pytest.mark.parametrize("masks_loss", [True, False])
def test_losses_and_gradients_are_those_of_single_documents(
    path: str, masks_loss: bool, blocks: BlockAttention
) -> None:
    """transformers' model sees one document at a time, at positions from 0."""
    model = model_of(path, blocks, data__eod_mask_loss=masks_loss)
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    ids, targets = split(windows(), model.packing)
    model.loss_sum(ids, targets).backward()
    wanted = torch.zeros(())
    for row, part in documents(ids):
        logits = reference(ids[row : row + 1, part]).logits[0]
        target = windows()[row, 1:][part]
        counted = len(target) - int(masks_loss and ids[row, part][-1] == EOD)
        if counted:
            wanted = wanted + F.cross_entropy(logits[:counted], target[:counted], reduction="sum")
    wanted.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        torch.testing.assert_close(model.loss_sum(ids, targets), wanted, rtol=1e-6, atol=0)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = dict(reference.named_parameters())
    for name, gradient in hugging_face_names(gradients, model.config.vocab_size).items():
        expected = theirs[name].grad
        error = (gradient - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize(
    ("masks", "counts"),
    [
        (True, lambda inputs, targets: inputs != EOD),  # PaddleFleetX's GPTDataset
        ("targets", lambda inputs, targets: targets != EOD),  # MindFormers' GPT2LMHeadModel
    ],
)
def test_the_losses_of_other_systems_are_a_closed_form(masks: Any, counts: Any) -> None:
    """Minus the mean of the log-probabilities that count, over a whole batch."""
    config = make_config(**dict.fromkeys(KEYS, False) | {"data__eod_mask_loss": masks})
    model, tokens = make_model(config), windows()
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    inputs, wanted = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        logs = reference(inputs).logits.double().log_softmax(-1)
        found = float(model.loss_sum(*split(tokens, config.packing))) / config.packing.counted(tokens.int().numpy())
    losses, counted = -logs.gather(-1, wanted[..., None])[..., 0], counts(inputs, wanted)
    assert 0 < counted.sum() < counted.numel()
    assert found == pytest.approx(losses[counted].mean().item(), rel=1e-6)
    assert found != pytest.approx(losses.mean().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", PATHS)
def test_nothing_leaks_between_documents(path: str, blocks: BlockAttention) -> None:
    """Other tokens in one document leave all bits of the others."""
    model, ids = model_of(path, blocks), windows()[:, :-1]
    changed = ids.clone()
    changed[0, 6:11] = 99 - (ids[0, 6:11] % 80)  # the second document of the first row
    assert not (changed[0, 6:11] == ids[0, 6:11]).any()
    with torch.no_grad():
        before, after = model(ids, ids), model(changed, changed)
    others = torch.ones(ids.shape, dtype=torch.bool)
    others[0, 6:12] = False
    assert torch.equal(before[others], after[others])
    assert not torch.isclose(before[0, 7:12], after[0, 7:12]).all(-1).any()


def test_each_key_acts_by_itself() -> None:
    (ids, targets), losses = split(windows()), {}
    for name in ("", *KEYS):
        model = make_model(make_config(**{key: key == name for key in KEYS}))
        losses[name] = model.loss_sum(*split(windows(), model.packing)).item()
        assert (model.packing is None) == (not name)
    assert len(set(losses.values())) == 4
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    places = torch.stack([document_positions(row[None], EOD)[0] for row in ids])
    logits = reference(ids, position_ids=places).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    assert losses["data__reset_position_ids"] == pytest.approx(wanted, rel=1e-6)


def test_one_graph_keeps_documents_apart_by_blocks(blocks: BlockAttention) -> None:
    """torch.compile traces masks and recomputation without a break, with the same gradients. Kernels are CUDA's."""
    model = model_of("blocks recomputed", blocks)
    ids, targets = split(windows(), model.packing)
    compiled = torch.compile(model.loss_sum, backend="aot_eager", fullgraph=True, dynamic=False)
    parameters = [*model.parameters()]
    eager, found = (torch.autograd.grad(f(ids, targets), parameters) for f in (model.loss_sum, compiled))
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-5)


def test_blocks_are_for_devices_with_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_model(make_config()).blocked is None
    monkeypatch.setattr(TorchDevice, "compiles", True)
    assert make_model(make_config()).h[0].attn.blocked is not None
    others = {"model__attention_dropout": 0.1, "precision": {"softmax": "bfloat16"}}
    others |= {"model__num_heads": 4, "data__reset_attention_mask": False}
    for key, value in others.items():
        assert make_model(make_config(**{key: value})).blocked is None


def test_the_mean_is_over_counted_tokens_of_the_global_batch() -> None:
    """Two micro batches with different numbers of documents, whose own means differ."""
    config = make_config()
    engine = Engine(config, CPU)
    engine.begin(Start())
    model = make_model(config)
    model.load_state_dict(engine.model.state_dict())
    tokens = windows()
    ids, targets = split(tokens, config.packing)
    counted = int((targets >= 0).sum())
    loss = model.loss_sum(ids, targets) / counted
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    batch = Batch(tokens=tokens.int().numpy(), samples=4, consumed_samples=4, sample_hash="")
    [result] = engine.run(iter([batch]), 1)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    parts = [model.loss_sum(*split(part, config.packing)) for part in tokens.split(2)]
    naive = sum(loss / (part != EOD).sum() for loss, part in zip(parts, ids.split(2), strict=True))
    assert abs(naive.item() / 2 / result.loss - 1) > 1e-4
    model.load_state_dict(engine.model.state_dict())
    total, number = engine.evaluate([np.asarray(tokens.int())])
    assert number == counted
    assert total == pytest.approx(model.loss_sum(ids, targets).item(), rel=1e-6)


def test_a_run_has_the_samples_of_one_without_and_is_evaluated(tmp_path: Path) -> None:
    corpus = write_packed_corpus(tmp_path)
    packed, plain = (
        train_here(tiny_run(tmp_path / name, corpus, **keys)) for name, keys in (("packed", FLAGS), ("plain", {}))
    )
    one, other = rows_of(plain), rows_of(packed)
    assert [row["sample_hash"] for row in one] == [row["sample_hash"] for row in other]
    assert one[0]["loss"] != other[0]["loss"]

    evaluate(*make_run(load_config(packed / "config.yaml"), "eval"))
    found = json.loads((packed / "evaluation.json").read_text())
    *_, last = read_metrics(packed / "metrics.jsonl")
    assert found["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["tokens"] == last["validation_tokens"]


def test_rows_of_an_evaluated_text_are_one_document_each() -> None:
    """Their first token may be the end-of-document token, which is context there."""
    model = make_model(make_config())
    rows = [ScoredRow(tokens=np.array([EOD, 9, 10, 11], np.int32), scored=3)]
    found = score_rows(rows, make_scorer(model, CPU), 1)
    reference = hugging_face_model(model.config, dict(model.named_parameters()))
    ids = torch.tensor([[EOD, 9, 10, 11]])
    wanted = F.cross_entropy(reference(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum")
    assert found.losses.sum() == pytest.approx(wanted.item(), rel=1e-5)
