"""The number of heads that a config says, against what models of the width have."""

from pathlib import Path

import pytest

from common.config.schema import ModelConfig
from common.conversion.heads import usual_heads, warn_of_heads
from common.training.log import LOG


@pytest.mark.parametrize(
    ("width", "heads", "usual"),
    [
        (192, 6, True),  # run_gpt2_tiny.yaml
        (192, 8, False),
        (384, 6, True),
        (768, 12, True),
        (768, 6, False),
        (1600, 25, True),
        (8192, 32, True),
        (4544, 71, True),
        (15, 5, False),  # of a width that none divides
    ],
)
def test_unusual_heads_are_said_at_any_width(capsys: pytest.CaptureFixture[str], width: int, heads: int, usual: bool) -> None:
    from common.training.log import start_log

    start_log()
    warn_of_heads(Path("hf"), ModelConfig(num_layers=1, hidden_size=width, num_heads=heads, seq_length=8, vocab_size=9))
    LOG.handlers.clear()
    assert (f"its config says {heads} heads" in capsys.readouterr().out) != usual


def test_the_published_models_come_first() -> None:
    assert [usual_heads(width)[0] for width in (768, 1024, 1280, 1600, 5120, 64)] == [12, 16, 20, 25, 80, 1]
