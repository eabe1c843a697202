"""Reader and writer of the args in a Megatron checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from common.config.resolved import ResolvedModel
from common.parallel.batch import pad_vocabulary
from common.systems.megatron.shards import Shards
from common.systems.megatron_args import model_of_args
from common.systems.weights import Weights
from common.tensor_files.torch_files import TorchName


def read_config(
    shards: Shards, rows: int
) -> tuple[ResolvedModel, dict[str, Any] | None, dict[str, str]]:
    """Return the model, the state of its run from a model.yaml, and notes for the user. rows: those
    of the padded embedding.
    """
    folders = (shards.folder, shards.folder.parent)
    return model_of_args(shards.first.path, vars(shards.args), rows, shards.tensor, folders)


def hysteresis(run: Any) -> int:
    """Return how many overflows a dynamic loss scale tolerates before it shrinks (Megatron's
    hysteresis).
    """
    return int(run["config"].get("loss_scale", {}).get("hysteresis", 2))


def model_args(weights: Weights, precision: str, tensor: int, stages: int) -> argparse.Namespace:
    """Return the args that describe a model. Megatron's ``check_checkpoint_args`` and
    ``load_args_from_checkpoint`` read them.
    """
    model = weights.model
    run: Any = weights.run or {"state": {"step": 0, "consumed_samples": 0}, "config": {}}
    return argparse.Namespace(
        num_layers=model.num_layers, encoder_num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size, num_attention_heads=model.num_heads,
        kv_channels=model.hidden_size // model.num_heads,
        group_query_attention=False, seq_length=model.seq_length,
        encoder_seq_length=model.seq_length,
        max_position_embeddings=model.max_positions, add_position_embedding=True,
        position_embedding_type="learned_absolute",
        use_rotary_position_embeddings=False, rotary_percent=1.0, tokenizer_type="GPT2BPETokenizer",
        vocab_size=model.vocab_size,
        make_vocab_size_divisible_by=model.vocab_multiple,
        padded_vocab_size=pad_vocabulary(model.vocab_size, model.vocab_multiple, tensor),
        layernorm_epsilon=model.layer_norm_epsilon, norm_epsilon=model.layer_norm_epsilon,
        normalization="LayerNorm",
        apply_layernorm_1p=False, apply_residual_connection_post_layernorm=False,
        add_bias_linear=True, bias_gelu_fusion=True,
        openai_gelu=False, squared_relu=False, swiglu=False,
        untie_embeddings_and_output_weights=False, num_experts=None,
        hidden_dropout=model.hidden_dropout, attention_dropout=model.attention_dropout,
        init_method_std=model.initializer_range,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None, data_parallel_random_init=False,
        use_distributed_optimizer=False,
        transformer_impl="local", fp16=precision == "float16", bf16=precision == "bfloat16",
        params_dtype=TorchName(f"torch.{precision}"),
        hysteresis=hysteresis(run), iteration=run["state"]["step"],
        consumed_train_samples=run["state"]["consumed_samples"],
        consumed_valid_samples=0,
    )  # fmt: skip
