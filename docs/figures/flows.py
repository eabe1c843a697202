"""Boxes, arrows and labels of the three pictures of docs/architecture.md."""

from __future__ import annotations

Words = tuple[str, ...]
"""Lines of a box: the first is its title."""

Box = tuple[int, int, int, str, Words, Words]
"""Column and row of the upper left, columns that it spans, kind, English and Chinese lines."""

Arrow = tuple[float, int, int]
"""Column, which may be a fraction, and the rows where it starts and ends."""

CONFIG: tuple[list[Box], list[Arrow]] = (
    [
        (0, 0, 1, "input", ("base: files", "presets build on them"), ("base 文件", "预设所继承的")),
        (
            1,
            0,
            1,
            "input",
            ("--config FILE", "wins over its bases"),
            ("--config 文件", "优先于 base"),
        ),
        (
            2,
            0,
            1,
            "input",
            ("section.key=value", "wins over both"),
            ("section.key=value", "优先级最高"),
        ),
        (
            3,
            0,
            1,
            "input",
            ("Another system's file", "common/systems/ translates"),
            ("其他系统的配置", "由 common/systems/ 转换"),
        ),
        (
            0,
            1,
            4,
            "shared",
            ("RunConfig: what the files say", "common/config/ checks every key, type and range"),
            ("RunConfig：文件里写了什么", "common/config/ 检查每个键、类型和取值范围"),
        ),
        (
            0,
            2,
            4,
            "shared",
            (
                "Run: what follows from it",
                "common/resolve/ derives batch, layout and vocabulary, and refuses contradictions",
            ),
            (
                "Run：由此推导出什么",
                "common/resolve/ 推导批大小、并行布局和词表，拒绝互相矛盾的设置",
            ),
        ),
        (
            0,
            3,
            1,
            "torch",
            ("torch_gpt2/", "train, eval, predict ..."),
            ("torch_gpt2/", "训练、评测、生成……"),
        ),
        (
            1,
            3,
            1,
            "mindspore",
            ("mindformers_gpt2/", "the same modes"),
            ("mindformers_gpt2/", "同样的模式"),
        ),
        (
            2,
            3,
            1,
            "output",
            ("--run_mode plan", "ranks, memory, time"),
            ("--run_mode plan", "rank、内存、时间"),
        ),
        (
            3,
            3,
            1,
            "output",
            ("config.yaml", "in the run folder, resolved"),
            ("config.yaml", "写入输出目录，值已补全"),
        ),
    ],
    [*((c + 0.5, r, r + 1) for r in (0, 2) for c in range(4)), (2.0, 1, 2)],
)

DATA: tuple[list[Box], list[Arrow]] = (
    [
        (
            0,
            0,
            1,
            "input",
            ("Text", ".txt, .jsonl, .json, .gz"),
            ("文本", ".txt、.jsonl、.json、.gz"),
        ),
        (1, 0, 1, "shared", ("Tokenizer", "common/tokenizer/"), ("分词器", "common/tokenizer/")),
        (
            2,
            0,
            1,
            "shared",
            (".bin/.idx or MindRecord", "documents of token ids"),
            (".bin/.idx 或 MindRecord", "按文档存放的 token id"),
        ),
        (
            3,
            0,
            1,
            "shared",
            ("Split and blend", "data.split, weights of files"),
            ("划分与混合", "data.split、各文件的权重"),
        ),
        (
            3,
            1,
            1,
            "shared",
            ("Samples", "window n = f(data, seed, n)"),
            ("样本", "第 n 个窗口由数据、种子和 n 决定"),
        ),
        (
            2,
            1,
            1,
            "shared",
            ("Sampler", "next = f(consumed samples)"),
            ("采样器", "读哪些只取决于已读样本数"),
        ),
        (
            1,
            1,
            1,
            "shared",
            ("Part of a data rank", "global batch / data parallel"),
            ("各数据并行 rank 的部分", "全局批次 ÷ 数据并行数"),
        ),
        (
            0,
            1,
            1,
            "torch",
            ("Engine", "micro batches, loss, update"),
            ("引擎", "微批次、loss、更新权重"),
        ),
    ],
    [
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
        (3.5, 0, 1),
        (3, 1, 1),
        (2, 1, 1),
        (1, 1, 1),
    ],
)

CHECKPOINTS: tuple[list[Box], list[Arrow]] = (
    [
        (
            0,
            0,
            2,
            "torch",
            ("torch_gpt2/ engine", "each rank its own part"),
            ("torch_gpt2/ 引擎", "各 rank 写自己的部分"),
        ),
        (
            2,
            0,
            2,
            "mindspore",
            ("mindformers_gpt2/ engine", "each rank its own part"),
            ("mindformers_gpt2/ 引擎", "各 rank 写自己的部分"),
        ),
        (
            0,
            1,
            4,
            "shared",
            (
                "checkpoints/step_00000300/",
                "manifest.json (state, checksums) · model.safetensors · optimizer.safetensors",
            ),
            (
                "checkpoints/step_00000300/",
                "manifest.json（训练状态、校验和）· model.safetensors · optimizer.safetensors",
            ),
        ),
        (
            0,
            2,
            1,
            "output",
            ("Resume", "any layout, either framework"),
            ("断点续训", "任意布局、任一框架"),
        ),
        (
            1,
            2,
            1,
            "output",
            ("eval, predict, serve", "newest checkpoint"),
            ("评测、生成、服务", "取最新的检查点"),
        ),
        (
            2,
            2,
            1,
            "output",
            ("Export", "safetensors, ONNX, GGUF ..."),
            ("导出", "safetensors、ONNX、GGUF……"),
        ),
        (
            3,
            2,
            1,
            "input",
            ("Other systems", "convert_weight.py, both ways"),
            ("其他系统", "convert_weight.py 双向转换"),
        ),
    ],
    [(1.0, 0, 1), (3.0, 0, 1), (0.5, 1, 2), (1.5, 1, 2), (2.5, 1, 2), (3.4, 1, 2), (3.6, 2, 1)],
)

FLOWS = {"config_flow": CONFIG, "data_flow": DATA, "checkpoint_flow": CHECKPOINTS}
"""Picture's name -> its boxes and arrows."""
