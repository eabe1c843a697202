"""lm-evaluation-harness on each backend, against its own model ``hf`` with the same weights.

Without the harness: its requests before a model sees them. Long inputs lose their beginning, a
continuation keeps its place, settings that are not known are refused.
"""

import importlib
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "configs" / "lm_eval"
GREEDY = """
task: continued
custom_dataset: !function data.lambada
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: ""
generation_kwargs: {until: ["e", "<|endoftext|>"], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: bypass, aggregation: bypass, higher_is_better: true}]
metadata: {version: 1.0}
"""
WIKITEXT = """
 = First article =

 The café of the first article , which has more bytes than the model has positions .

 = = A section = =

 hello hello the end

 = Second article =

 Short .
"""


def test_tasks_read_json_lines_without_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = SimpleNamespace(process_results=None, wikitext_detokenizer=None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=list)))  # type: ignore[arg-type]
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.wikitext", "lm_eval.tasks.wikitext.preprocess_wikitext"):
        monkeypatch.setitem(sys.modules, name, harness)  # type: ignore[arg-type]
    tasks, file = runpy.run_path(str(TASKS / "data.py")), tmp_path / "texts.jsonl"
    file.write_text('{"text": "a", "text": "b"}\n\n{"text": "c"}\n')
    assert tasks["lambada"](lambada=str(file)) == {"test": [{"text": "b"}, {"text": "c"}]}
    file.write_text('{"text": "a"}\n{"text"')
    with pytest.raises(DataError, match=r"texts\.jsonl:2: not valid JSON"):
        tasks["lambada"](lambada=str(file))


def test_without_the_package_one_message_says_what_to_install() -> None:
    program = (
        "import sys, runpy; sys.modules['lm_eval'] = None; sys.argv = ['lm_eval.py', *sys.argv[1:]];"
        " sys.path[0] = 'tools'; runpy.run_path('tools/lm_eval.py', run_name='__main__')"
    )
    for words, code, said in (
        (["ls", "tasks"], 2, "pip install -c constraints.txt -e '.[eval]'"),
        (["--help"], 0, "usage: lm_eval.py"),
    ):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stderr
        assert said in (done.stderr if code else done.stdout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of random weights as transformers' folder and as ONNX, the documents, the tasks."""
    from tests.reference import MERGES, save_model, write_vocabulary
    from tools.convert_weight import main as convert

    root = tmp_path_factory.mktemp("models")
    source = save_model(root / "hf", write_vocabulary(root / "vocabulary", MERGES), size=262)
    words = ["--to", "onnx", "--input", str(source), "--output", str(root / "onnx")]
    assert convert(words) == 0
    lines = ["hello the end", "the café of hello", "a b c " * 40 + "hello the last"]
    rows = [{"text": line} for line in lines]
    (root / "lambada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "wiki.test.raw").write_text(WIKITEXT)
    cloze = {"content": "他#idiom#地走了", "candidates": ["头也不回", "一心一意"], "answer": 1}
    (root / "chid.json").write_text(json.dumps(cloze, ensure_ascii=False))
    (root / "tasks").mkdir()
    for path in TASKS.iterdir():
        (root / "tasks" / path.name).symlink_to(path)
    (root / "tasks" / "continued.yaml").write_text(GREEDY)
    return {"hf": source, "onnx": root / "onnx", "root": root}


def evaluated(folders: dict[str, Path], model: str, **arguments: Any) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    root = folders["root"]
    metadata = {
        "lambada": str(root / "lambada.jsonl"), "wikitext": str(root / "wiki.test.raw"),
        "chid": str(root / "chid.json"),
    }  # fmt: skip
    manager = TaskManager(include_path=str(root / "tasks"), metadata=metadata)
    tasks = ["lambada_local", "wikitext_local", "chid_local", "continued"]
    found = simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, batch_size=2, device="cpu",
        task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert found is not None
    return dict(found)


@pytest.fixture(scope="module")
def of_hf(folders: dict[str, Path]) -> dict[str, Any]:
    pytest.importorskip("lm_eval.evaluator")
    return evaluated(folders, "hf", pretrained=str(folders["hf"]), dtype="float32")


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "backend"), [("hf", "torch"), ("hf", "mindspore"), ("onnx", "onnx")])
def test_the_harnesses_own_model_says_the_same(folders, of_hf, name, backend, request) -> None:
    if backend == "mindspore":
        request.getfixturevalue("mindspore")
    import gpt2_toolkit.lm_eval  # noqa: F401

    found = evaluated(folders, "gpt2_toolkit", path=str(folders[name]), backend=backend)

    def answers(found: dict[str, Any]) -> dict[str, list[Any]]:
        samples = found["samples"].items()
        return {task: [each for one in listed for each in one["resps"]] for task, listed in samples}

    ours, theirs = answers(found), answers(of_hf)
    assert ours["continued"] == theirs["continued"] and any(map(any, ours["continued"]))
    for task in ("lambada_local", "wikitext_local", "chid_local"):
        assert len(ours[task]) == len(theirs[task]) > 1
        for mine, other in zip(ours[task], theirs[task], strict=True):
            if task == "wikitext_local":
                assert mine[0] == pytest.approx(other[0], rel=1e-6)
            else:  # float32, added in other orders: 1e-6 of sums up to some hundreds
                assert mine[0][0] == pytest.approx(other[0][0], rel=1e-6)
                assert mine[0][1] == other[0][1]
    results, reference = found["results"], of_hf["results"]
    for task, metric in (("lambada_local", "perplexity"), ("wikitext_local", "byte_perplexity")):
        loss, expected = (math.log(each[task][f"{metric},none"]) for each in (results, reference))
        print(f"{backend} {task}: loss {loss:.9f}, hf {expected:.9f}")
        assert loss == pytest.approx(expected, rel=1e-6)
    stamp = found["config"]["gpt2_toolkit"]
    assert (stamp["backend"], stamp["window"]) == (backend, 64)


@pytest.mark.campaign
def test_bad_arguments(folders: dict[str, Path]) -> None:
    pytest.importorskip("lm_eval.evaluator")
    start = f"tools/lm_eval.py --tasks lambada_local --include_path {TASKS} --model gpt2_toolkit"
    metadata = json.dumps({"lambada": str(folders["root"] / "lambada.jsonl")})
    for words, message in (
        ("path=absent", "no model here"),
        ("path={hf} --device tpu", "device: input should be"),
        ("path={hf},max_length=65", "expected 1 to 64"),
        ("path={hf},pretrained=x", "pretrained: not known"),
    ):
        given = words.format(hf=folders["hf"]).split()
        command = [sys.executable, *start.split(), "--metadata", metadata, "--model_args", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and message in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in done.stderr


def test_the_tasks_name_functions_that_are_there() -> None:
    code = (TASKS / "data.py").read_text()
    for path in TASKS.glob("*.yaml"):
        text = path.read_text()
        assert yaml.safe_load(text.replace("!function ", ""))["task"] == path.stem
        for line in text.splitlines():
            name = line.partition("!function data.")[2]
            assert not name or f"def {name}(" in code or f" as {name}," in code


# ---- without the harness ----


class Recorder:
    """A model of 8 positions whose words are numbers; it keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tokenizer = SimpleNamespace(eod_id=0)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def score_ids(self, rows: list[list[int]], starts: list[int]) -> list[Any]:
        self.asked += zip(rows, starts, strict=True)
        return [SimpleNamespace(logprob=-float(sum(row)), is_greedy=True) for row in rows]

    def generate(self, prompts: list[list[int]], **settings: Any) -> list[Any]:
        self.asked.append((prompts, settings))
        return [SimpleNamespace(text=f"{prompt[-1]}.{prompt[0]}") for prompt in prompts]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter around a Recorder; names of the harness that it imports are stand-ins."""
    if "lm_eval" not in sys.modules:
        names: dict[str, dict[str, Any]] = {
            "lm_eval": {}, "lm_eval.api": {}, "lm_eval.models": {},
            "lm_eval.api.model": {"TemplateLM": object},
            "lm_eval.api.registry": {"register_model": lambda name: lambda kind: kind},
            "lm_eval.models.utils": {
                "handle_stop_sequences": lambda until, eos: until,
                "normalize_gen_kwargs": lambda given, count: {
                    "until": [], "max_gen_toks": count, "do_sample": False, **given
                },
                "postprocess_generated_text": lambda text, stops, end: text.partition(stops[0])[0],
            },
            "lm_eval.utils": {"get_rolling_token_windows": None, "make_disjoint_window": None},
        }  # fmt: skip
        for name, members in names.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
        monkeypatch.delitem(sys.modules, "gpt2_toolkit.lm_eval", raising=False)
    kind = importlib.import_module("gpt2_toolkit.lm_eval").HarnessModel
    monkeypatch.delitem(sys.modules, "gpt2_toolkit.lm_eval")
    found = kind.__new__(kind)
    found.model, found.max_length, found.max_gen_toks = Recorder(), 8, 3
    found.cache_hook = SimpleNamespace(add_partial=lambda *_: None)
    return found


def test_long_inputs_lose_their_beginning(adapter: Any) -> None:
    pairs = [([1, 2], [3]), (list(range(1, 12)), [12, 13]), ([1], list(range(2, 10)))]
    found = adapter._loglikelihood_tokens([(("a", "b"), *pair) for pair in pairs])
    # 8 inputs, and the last target, which is not an input
    assert adapter.model.asked == [
        ([1, 2, 3], 2), ([5, 6, 7, 8, 9, 10, 11, 12, 13], 7), ([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    ]  # fmt: skip
    assert [value for value, _ in found] == [-6.0, -81.0, -45.0]
    with pytest.raises(ConfigError, match="a continuation of 9 tokens, and the model sees 8"):
        adapter._loglikelihood_tokens([(("a", "b"), [1], [2] * 9)])


def test_prompts_leave_room_for_what_follows(adapter: Any) -> None:
    greedy, drawn = {"until": ["."]}, {"until": ["."], "do_sample": True, "temperature": 0.5}
    asked = [("1 2", greedy), ("9 9", drawn), ("1 2 3 4 5 6 7", greedy), ("", greedy)]
    found = adapter.generate_until([SimpleNamespace(args=each) for each in asked])
    assert adapter.model.asked == [
        ([[1, 2], [3, 4, 5, 6, 7], [0]], {"max_new_tokens": 3}),
        ([[9, 9]], {"max_new_tokens": 3, "strategy": "sampling", "temperature": 0.5}),
    ]
    assert found == ["2", "9", "7", "0"]
    for settings, message in (
        ({"max_gen_toks": 8}, "max_gen_toks=8 leaves no place"),
        ({"min_p": 1}, "min_p: not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            adapter.generate_until([SimpleNamespace(args=("1", settings))])
