"""The verdict in words, a sentence or two each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from common.study.results import State, Study
from common.study.same_losses import Departure, Difference, GroupVerdict, Kind
from common.study.statistics import Summary
from common.study.verdict import MEMORY_TOLERANCE, OrderCheck, Ranking, Verdict
from common.study.words import (
    MEMORY,
    STATES,
    Text,
    both,
    names,
    number,
    percent,
    size,
    small,
    speed,
)

Mark = Literal["good", "bad", "note"]
_MOST = 5
"""Cells that differ and predictions that are wrong, listed one by one."""


class Remark(NamedTuple):
    """One line of the verdict. mark: whether it is as it should be, wrong, or neither."""

    mark: Mark
    text: Text


def remarks(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> list[Remark]:
    """Return the verdict, most important first."""
    return [
        *_calculated(study, cells),
        *_unfinished(study, cells),
        *(line for group in verdict.groups for line in _group(group)),
        *(_ranking(ranking, cells) for ranking in verdict.rankings),
        *_failures(cells),
        *_memory(verdict),
        *(_order(verdict.order) if verdict.order else ()),
    ]


def _calculated(study: Study, cells: Mapping[str, Summary]) -> Iterator[Remark]:
    if study.calculated:
        name = study.accelerator or "?"
        yield Remark(
            "note",
            Text(
                f"Calculated for {name}: nothing ran. Times follow from peak rates and serve to"
                " compare layouts with each other; they do not foretell a speed.",
                f"本报告为针对 {name} 的计算结果，未实际运行。时间由峰值算力估算，适合比较各布局的"
                "相对快慢，不代表实测速度。",
            ),
        )
    large = [name for name, cell in cells.items() if cell.peak_memory and not cell.fits]
    if study.calculated and large:
        listed, device = names(large), study.accelerator or "?"
        yield Remark(
            "bad",
            Text(
                f"Does not fit into the memory of {device}: {listed.en}.",
                f"超出 {device} 的内存：{listed.zh}。",
            ),
        )


def _unfinished(study: Study, cells: Mapping[str, Summary]) -> Iterator[Remark]:
    missing = [
        name
        for name, cell in cells.items()
        if not study.calculated and cell.state in (None, State.FINISHED)
        if len(cell.result.repeats) < study.repeats
    ]
    if missing:
        listed = names(missing)
        yield Remark(
            "note",
            Text(
                f"Not finished: repeats are missing for {len(missing)} of {len(cells)} cells"
                f" ({listed.en}).",
                f"尚未完成：{len(cells)} 个配置中有 {len(missing)} 个还有未运行的重复（"
                f"{listed.zh}）。",
            ),
        )


def _failures(cells: Mapping[str, Summary]) -> Iterator[Remark]:
    states = [cell.state for cell in cells.values()]
    for state in State:
        failed = [name for name, cell in cells.items() if cell.state is state]
        if state is State.FINISHED or not failed:
            continue
        listed, word = names(failed), STATES[state]
        yield Remark(
            "note" if state is State.REFUSED else "bad",
            Text(
                f"No result, {word.en}: {listed.en} ({len(failed)} of {len(states)} cells).",
                f"无结果（{word.zh}）：{listed.zh}，占 {len(states)} 个配置中的 {len(failed)} 个。",
            ),
        )
    partly = [name for name, cell in cells.items() if cell.runs and cell.failures]
    if partly:
        listed = names(partly)
        yield Remark(
            "bad",
            Text(
                f"Some repeats failed, others finished: {listed.en}.",
                f"部分重复失败、其余完成：{listed.zh}。",
            ),
        )


# ---- losses ----


def _group(group: GroupVerdict) -> Iterator[Remark]:
    named = group.name not in ("", "all")
    where = Text(f" in group `{group.name}`", f"（组 `{group.name}`）") if named else Text("", "")
    if len(group.same) > 1:
        listed = names(group.same)
        loss, norm = small(group.largest[Kind.LOSS]), small(group.largest[Kind.NORM])
        count = f"{'' if group.different else 'all '}{len(group.same)} cells"
        yield Remark(
            "good",
            Text(
                f"Same losses{where.en}: {count} compute the same ({listed.en}). Samples,"
                f" losses and gradient norms agree with `{group.reference}` at every step within"
                f" {group.tolerance:g} relative; the largest difference is {loss} for losses,"
                f" {norm} for norms.",
                f"损失一致{where.zh}：{len(group.same)} 个配置计算结果相同（{listed.zh}）。"
                "各步的样本、"
                f"损失与梯度范数都与 `{group.reference}` 一致，相对容差 {group.tolerance:g}；"
                "最大相对"
                f"差异：损失 {loss}，范数 {norm}。",
            ),
        )
    elif not group.different:
        yield Remark(
            "note",
            Text(
                f"Losses not compared{where.en}: only `{group.reference}` has a result.",
                f"未比较损失{where.zh}：只有 `{group.reference}` 有结果。",
            ),
        )
    yield from (_different(each, where) for each in group.different[:_MOST])
    if left := [each.cell for each in group.different[_MOST:]]:
        listed = names(left)
        yield Remark(
            "bad",
            Text(f"Different{where.en}, too: {listed.en}.", f"同样不一致{where.zh}：{listed.zh}。"),
        )


def _different(each: Difference, where: Text) -> Remark:
    found = describe_departure(each.departure)
    own = each.cell == each.reference
    other = Text(
        "an earlier repeat of itself" if own else f"`{each.reference}`",
        "自身更早的重复" if own else f" `{each.reference}` ",
    )
    late = each.repeat > 1
    repeat = Text(f" (repeat {each.repeat})", f"（第 {each.repeat} 次重复）") if late else both("")
    return Remark(
        "bad",
        Text(
            f"Different{where.en}: `{each.cell}`{repeat.en} does not compute the same as"
            f" {other.en}: {found.en}.",
            f"不一致{where.zh}：`{each.cell}`{repeat.zh} 与{other.zh}计算结果不同：{found.zh}。",
        ),
    )


def describe_departure(each: Departure) -> Text:
    """Return a clause that says what differs, at which step and by how much."""
    found, expected = number(each.found), number(each.expected)
    step, off = each.step, percent(each.relative) if each.is_finite else ""
    match each.kind:
        case Kind.SAMPLES:
            later = f"; losses differ from step {step}" if step else "; the losses happen to agree"
            return Text(
                f"it saw other samples (hash {found[:12]}, expected {expected[:12]}), as with"
                f" another seed, other data or another order{later}",
                f"所见样本不同（哈希 {found[:12]}，应为 {expected[:12]}），例如随机种子、"
                "数据或顺序不同；" + (f"损失自第 {step} 步起不同" if step else "损失恰好一致"),
            )
        case Kind.STEPS:
            return Text(
                f"losses and gradient norms recorded: {found}, expected {expected}, and at least"
                " one of each",
                f"记录的损失与梯度范数个数：{found}，应为 {expected}，且各不少于一个",
            )
        case Kind.NORM if each.factor is not None:
            return Text(
                f"every gradient norm is {each.factor:.5g} times the expected one from step {step},"
                " while losses agree: the gradient has a wrong scale, which Adam and a clip that"
                " always acts hide",
                f"自第 {step} 步起，每步的梯度范数都是应有值的 {each.factor:.5g} 倍，而损失一致："
                "梯度的缩放有误，Adam 与始终生效的裁剪会掩盖这种错误",
            )
    what = Text(str(each.kind), "损失" if each.kind is Kind.LOSS else "梯度范数")
    if not each.is_finite:
        return Text(
            f"the {what.en} at step {step} is {found}, expected {expected}; both must be finite,"
            " or both skipped by the loss scale",
            f"第 {step} 步的{what.zh}为 {found}，应为 {expected}；须都为有限值，"
            "或都因损失缩放而跳过该步",
        )
    return Text(
        f"the {what.en} differs from step {step}: {found}, expected {expected} ({off} apart)",
        f"{what.zh}自第 {step} 步起不同：{found}，应为 {expected}（相差 {off}）",
    )


# ---- speed ----


def _ranking(ranking: Ranking, cells: Mapping[str, Summary]) -> Remark:
    first, second = ranking.cells[:2]
    next_one = ranking.behind[second]
    shared = ", ".join(f"{axis}={text}" for axis, text in ranking.labels.items())
    where = Text(f" of {shared}", f"（{shared}）") if shared else Text("", "")
    rate = speed(cells[first].tokens_per_second or 0)
    lead = _faster(next_one.ratio, second)
    if ranking.calculated:
        if next_one.ratio <= 1 + 1e-9:
            lead = Text(f"as fast as `{second}`", f"与 `{second}` 持平")
        return Remark(
            "note",
            Text(
                f"Fastest{where.en} by calculation: `{first}`, {rate} tokens/s, {lead.en}.",
                f"计算所得最快{where.zh}：`{first}`，{rate} tokens/s，{lead.zh}。",
            ),
        )
    if next_one.margin is None:
        return Remark(
            "note",
            Text(
                f"Fastest{where.en} as measured: `{first}`, {rate} tokens/s, {lead.en}. With fewer"
                " than two repeats of both, nothing says whether this is more than chance.",
                f"实测最快{where.zh}：`{first}`，{rate} tokens/s，{lead.zh}。"
                "两者的共同重复不足两次，无法判断差异是否超出波动。",
            ),
        )
    equal, margin = ranking.equal, percent(next_one.margin)
    if not equal:
        return Remark(
            "good",
            Text(
                f"Fastest{where.en}: `{first}`, {rate} tokens/s, {lead.en}, the next one. The"
                f" spread of the repeats allows {margin}.",
                f"最快{where.zh}：`{first}`，{rate} tokens/s，{lead.zh}（第二名）；"
                f"重复之间的波动可解释 {margin}。",
            ),
        )
    return _undecided(ranking, where, rate)


def _undecided(ranking: Ranking, where: Text, rate: str) -> Remark:
    first, equal = ranking.cells[0], ranking.equal
    found = [ranking.behind[name] for name in equal]
    most = percent(max(abs(each.ratio - 1) for each in found))
    margin = percent(max(each.margin or 0.0 for each in found))
    listed = names([first, *equal])
    slower = [name for name in ranking.cells[1:] if name not in equal]
    en, zh = "", ""
    if slower:
        nearest = slower[0]
        lead = _faster(ranking.behind[nearest].ratio, nearest)
        en = f" `{first}` is {lead.en}, the first that is slower."
        zh = f"`{first}` {lead.zh}，后者是其后第一个明显更慢的。"
    return Remark(
        "note",
        Text(
            f"No difference{where.en}: {listed.en} cannot be told apart. They differ by at most"
            f" {most} ({rate} tokens/s at best); the spread of the repeats allows {margin}.{en}",
            f"无差异{where.zh}：{listed.zh} 无法区分快慢。相差至多 {most}（最快 {rate} tokens/s），"
            f"而重复之间的波动可解释 {margin}。{zh}",
        ),
    )


def _faster(ratio: float, other: str) -> Text:
    """Say how fast something is beside ``other``: in percent, and from twice on as a multiple."""
    if ratio < 2:
        more = percent(ratio - 1)
        return Text(f"{more} faster than `{other}`", f"比 `{other}` 快 {more}")
    return Text(f"{ratio:.2g} times as fast as `{other}`", f"速度为 `{other}` 的 {ratio:.2g} 倍")


# ---- predictions ----


def _memory(verdict: Verdict) -> Iterator[Remark]:
    """One line for each kind of memory that was measured."""
    for kind in dict.fromkeys(check.kind for check in verdict.memory):
        checks = [check for check in verdict.memory if check.kind == kind]
        wrong = sorted(
            (check for check in checks if not check.is_right), key=lambda check: -abs(check.error)
        )
        shown, bound, what = wrong[:_MOST], percent(MEMORY_TOLERANCE), MEMORY[kind]
        rows = [
            (
                f"`{check.cell}`",
                size(check.predicted),
                size(check.measured),
                percent(check.error, signed=True),
            )
            for check in shown
        ]
        en = "; ".join(f"{a} planned {b}, measured {c} ({d})" for a, b, c, d in rows)
        zh = "；".join(f"{a} 预测 {b}，实测 {c}（{d}）" for a, b, c, d in rows)
        more, right = len(wrong) - len(shown), len(checks) - len(wrong)
        yield Remark(
            "good" if not wrong else "bad" if all(check.is_exact for check in wrong) else "note",
            Text(
                f"Memory, {what.en}: the plan is within {bound} of the measurement for {right} of"
                f" {len(checks)} cells."
                + (f" Farthest off: {en}{f'; and {more} more' if more else ''}." if wrong else ""),
                f"内存（{what.zh}）：{len(checks)} 个配置中有 {right} 个"
                f"的预测与实测相差不超过 {bound}。"
                + (f"偏差最大：{zh}{f'；另有 {more} 个' if more else ''}。" if wrong else ""),
            ),
        )


def _order(order: OrderCheck) -> Iterator[Remark]:
    right = order.pairs - len(order.wrong)
    worst = sorted(order.wrong, key=lambda pair: -pair[2])[:_MOST]
    rows = [(one, _faster(1 + found, other), percent(-said)) for one, other, found, said in worst]
    en = "; ".join(
        f"`{one}` was {lead.en}, the plan says {said} slower" for one, lead, said in rows
    )
    zh = "；".join(f"`{one}` 实测{lead.zh}，而预测慢 {said}" for one, lead, said in rows)
    yield Remark(
        "bad" if order.wrong else "good",
        Text(
            f"Order by time: the plan is right about {right} of {order.pairs} pairs that the"
            f" measurement tells apart.{f' Wrong: {en}.' if en else ''}",
            f"快慢次序：在实测可区分的 {order.pairs} 对配置中，预测正确 {right} 对。"
            + (f"错误：{zh}。" if zh else ""),
        ),
    )
