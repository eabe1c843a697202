"""The report of a study: what it found, as a list of parts that are written as Markdown or HTML."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from common.accelerators import GIB
from common.study.plots import Picture
from common.study.results import CellResult, Machine, Study
from common.study.same_losses import OTHER_KERNELS
from common.study.sentences import Remark, remarks
from common.study.statistics import CONFIDENCE, Summary
from common.study.table import Table, main_table, own_table, split_table
from common.study.verdict import Verdict
from common.study.words import STATES, Text, both, percent
from common.yaml_files import dump_yaml


@dataclass(frozen=True, kw_only=True)
class Heading:
    text: Text


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    text: Text


@dataclass(frozen=True, kw_only=True)
class Remarks:
    lines: tuple[Remark, ...]


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text as it is. title: of a block that is folded in HTML."""

    title: Text
    text: str


Part = Heading | Paragraph | Remarks | Table | Picture | Code


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    subtitle: Text
    parts: tuple[Part, ...]


def make_report(
    study: Study, cells: Mapping[str, Summary], verdict: Verdict, pictures: Sequence[Picture]
) -> Report:
    """Return the report: the verdict first, then tables and pictures, then how to repeat it."""
    return Report(
        title=study.title,
        subtitle=_subtitle(study),
        parts=(
            Heading(text=Text("Verdict", "结论")),
            Remarks(lines=tuple(remarks(study, cells, verdict))),
            Heading(text=Text("Results", "结果")),
            main_table(study, cells, verdict),
            *pictures,
            *_more_tables(study, cells),
            *_failed(cells),
            Heading(text=Text("How it was measured", "测量方法")),
            *(Paragraph(text=text) for text in _method(study)),
            Heading(text=Text("Machine and versions", "机器与版本")),
            _machine(study),
            Heading(text=Text("Repeating it", "如何复现")),
            *_repeating(study),
        ),
    )


def make_example(
    study: Study, cells: Mapping[str, Summary], verdict: Verdict, pictures: Sequence[Picture]
) -> Report:
    """Return the part of a report that is kept beside the documentation."""
    return Report(
        title=study.title,
        subtitle=_subtitle(study),
        parts=(
            Remarks(lines=tuple(remarks(study, cells, verdict))),
            main_table(study, cells, verdict),
            *pictures,
        ),
    )


def _subtitle(study: Study) -> Text:
    day = datetime.fromisoformat(study.started).strftime("%Y-%m-%d %H:%M")
    where = _machine_line(study.machine)
    variant = Text(", small variant", "，小型版本") if study.small else both("")
    if study.calculated:
        return Text(
            f"Study `{study.name}`{variant.en}, calculated for {study.accelerator} on {day}",
            f"研究 `{study.name}`{variant.zh}，{day} 针对 {study.accelerator} 计算",
        )
    return Text(
        f"Study `{study.name}`{variant.en}, started {day} on {where}",
        f"研究 `{study.name}`{variant.zh}，{day} 开始，运行于 {where}",
    )


def _machine_line(machine: Machine) -> str:
    devices = ", ".join(
        f"{machine.accelerators.count(name)} x {name}"
        for name in dict.fromkeys(machine.accelerators)
    )
    return devices or f"{machine.cpu}, {machine.cores} cores"


def _more_tables(study: Study, cells: Mapping[str, Summary]) -> Iterator[Part]:
    split, own = split_table(study, cells), own_table(cells)
    if split:
        yield Heading(text=Text("Time of a step", "单步时间"))
        yield split
    if own:
        yield Heading(text=Text("Speed as other systems define it", "按各原系统定义的速度"))
        yield own


def _failed(cells: Mapping[str, Summary]) -> Iterator[Part]:
    rows = [
        (both(f"`{name}`"), both(str(run.index)), STATES[run.state], both(run.reason or "–"))
        for name, cell in cells.items()
        for run in cell.failures
    ]
    rows += [
        (both(f"`{name}`"), both("–"), Text("not predicted", "未能预测"), both(expected.reason))
        for name, cell in cells.items()
        if (expected := cell.result.prediction) is not None
        if not cell.result.repeats and not cell.speeds and expected.reason
    ]
    if rows:
        yield Heading(text=Text("Cells without a result", "没有结果的配置"))
        yield Table(
            head=(
                Text("cell", "配置"),
                Text("repeat", "第几次"),
                Text("state", "状态"),
                Text("reason", "原因"),
            ),
            rows=tuple(rows),
            words=True,
        )


def _method(study: Study) -> Iterator[Text]:
    if study.calculated:
        yield Text(
            "The planner computed every figure from the configuration and the accelerator's peak"
            " rates (`run_gpt2.py --run_mode plan` shows the same of one run). Nothing was"
            " measured.",
            "全部数字由规划器根据配置与加速器峰值指标计算（`run_gpt2.py --run_mode plan` 对"
            "单个任务给出相同"
            "结果），没有实测。",
        )
        return
    yield Text(
        f"Each cell ran {study.repeats} times, {study.warmup_steps} steps of warm-up and"
        f" {study.measured_steps} measured ones each; repeats of different cells alternate, so"
        " that slow drift of the machine favours none. The speed of a repeat is its tokens a step"
        " by the median time of its measured steps; a cell's is the median over repeats.",
        f"每个配置运行 {study.repeats} 次，每次预热 {study.warmup_steps} 步、"
        f"计时 {study.measured_steps} 步；"
        "不同配置的重复交替进行，以免机器状态的缓慢变化偏向某个配置。"
        "每次重复的速度为每步 token 数除以计时步的"
        "中位时间；配置的速度为各次重复的中位数。",
    )
    planned = any(each.prediction and each.prediction.step_seconds for each in study.cells)
    if planned and not study.machine.accelerators:
        yield Text(
            "Planned times follow from rates of this processor, measured in a moment before the"
            " first run: float32 matrix products, copies of memory and bytes over a socket. They"
            " serve to order the cells.",
            "预测时间由本机处理器的速率推算，速率在首次运行前快速测得：float32 矩阵乘、"
            "内存复制与套接字传输。"
            "预测时间用于排出快慢次序。",
        )
    sure = percent(CONFIDENCE)
    yield Text(
        "Two cells are compared over their common repeats, pair by pair. One is called faster only"
        f" where the mean difference exceeds what repeats explain: Student's {sure} interval of"
        " the paired difference, by this pair's deviation or the one pooled over all cells,"
        " whichever is larger, and widened for the number of comparisons. The speed-up is the"
        " median over pairs; the efficiency is the speed-up by the ratio of ranks.",
        "两个配置按共同的重复逐对比较。只有平均差异超出重复波动所能解释的范围才判定更快："
        "取配对差的 Student"
        f" {sure} 区间，标准差取该对自身与全部配置合并估计中的较大者，并按比较次数放宽。"
        "加速比为各对比值的"
        "中位数；效率为加速比除以进程数之比。",
    )
    reason = study.tolerance_reason
    yield Text(
        "Cells of a group must see the same samples, and their losses and gradient norms must be"
        f" finite and agree at every step, warm-up included, within {study.tolerance:g} relative"
        f"{f' ({reason})' if reason else ''}; between two frameworks, or this project and a"
        f" peer, within at least {OTHER_KERNELS:g}, since their kernels add up in another order."
        " Norms are compared because Adam, and a clip that always acts, hide a gradient of the"
        " wrong scale from the losses. The reference is the cell that most others agree with.",
        "同组配置须见到相同的样本，且每一步（含预热）的损失与梯度范数都为有限值并在相对容差"
        f" {study.tolerance:g} 内一致{f'（{reason}）' if reason else ''}；"
        "不同框架之间或与外部实现相比，容差不小于"
        f" {OTHER_KERNELS:g}，因为各自的算子求和顺序不同。之所以比较范数，"
        "是因为 Adam 与始终生效的裁剪会让"
        "损失看不出梯度缩放的错误。参照配置取与最多配置一致者。",
    )


def _machine(study: Study) -> Table:
    machine = study.machine
    pairs = [
        (Text("host", "主机"), machine.host),
        (Text("processor", "处理器"), f"{machine.cpu}, {machine.cores} cores"),
        (Text("memory", "内存"), f"{machine.memory / GIB:.1f} GiB"),
    ]
    if machine.accelerators:
        pairs.append((Text("accelerators", "加速器"), _machine_line(machine)))
    pairs.append((Text("started", "开始"), study.started))
    pairs.append((Text("finished", "结束"), study.finished or "–"))
    pairs += [(both(name), version) for name, version in study.versions.items()]
    return Table(
        head=(Text("what", "项目"), Text("found", "内容")),
        rows=tuple((name, both(value)) for name, value in pairs),
        words=True,
    )


def _repeating(study: Study) -> Iterator[Part]:
    yield Code(
        title=Text("The definition of the study, as it was run", "研究的定义（实际运行的版本）"),
        text=dump_yaml(study.definition).rstrip("\n"),
    )
    commands = "\n".join(line for result in study.cells for line in _command(result))
    if commands:
        yield Code(title=Text("One command a cell", "每个配置的命令"), text=commands)


def _command(result: CellResult) -> Iterator[str]:
    command = next((run.command for run in result.repeats if run.command), None)
    if command:
        yield f"# {result.cell.id}"
        yield shlex.join(command)
