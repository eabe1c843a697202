"""A resolved run: what is computed from it is computed once, and never outlives a change."""

from common.config.load import build_config, dump_config
from common.config.resolved import ResolvedModel, as_run
from common.config.schema import RunConfig
from common.parallel.run import Run
from common.resolve.derive import resolve_config
from common.yaml_files import parse_yaml
from tests.tiny import tiny_run


def written() -> RunConfig:
    train = {"max_epochs": 2, "micro_batch_size": 2, "global_batch_size": 8}
    optimizer = {"learning_rate": 0.1, "warmup_fraction": 0.5}
    sizes = {"model__vocab_size": 256}
    words = {"train": train, "optimizer": optimizer, "parallel": {"model_parallel": 2}}
    return build_config(tiny_run("out", **sizes, **words))


def test_it_carries_what_follows_from_it() -> None:
    run = resolve_config(written(), world_size=4)
    assert isinstance(run, Run) and isinstance(run.model, ResolvedModel)
    assert (run.topology.data, run.topology.tensor, run.topology.world_size) == (2, 2, 4)
    assert (run.batch.global_batch, run.batch.accumulation) == (8, 2)
    assert run.vocab_rows == 256 and run.sizes.vocabulary == 256 and run.sizes.ffn == 128
    assert run.topology is run.topology


def test_the_length_follows_from_the_data() -> None:
    assert resolve_config(written(), world_size=4).train.max_steps is None
    run = resolve_config(written(), world_size=4, samples_per_epoch=40)
    assert isinstance(run, Run)
    assert (run.train.max_steps, run.optimizer.warmup, run.optimizer.decay) == (10, 5, 10)


def test_it_is_written_and_read_as_a_config() -> None:
    run = resolve_config(written(), world_size=4)
    found, given = run.model_dump(), written().model_dump()
    assert run.sizes and list(found) == list(given) and list(found["model"]) == list(given["model"])
    assert resolve_config(build_config(parse_yaml(dump_config(run))), world_size=4) == run
    assert as_run(RunConfig, run) == build_config(run.model_dump())
