"""Sections about models of text: results over steps, at equal entropy, and beside the paper's."""

from __future__ import annotations

from dataclasses import replace

from imdm.evaluation import Row, metrics
from imdm.report import paper, plots
from imdm.report.equal import (
    LEAST,
    Frontier,
    equal_entropy_tables,
    first_in_words,
    firsts,
    variety_table,
)
from imdm.report.names import method_in_words, metric_in_words, row_names
from imdm.report.page import Beside, Part, Picture, Section
from imdm.report.ratios import ratio_table, ratios
from imdm.report.sections import Results, read_by, sections
from imdm.report.tables import Table, figure, steps_in_words

CURVES = {"gen_ppl": "generative perplexity", "entropy": "entropy (nats)", "mauve": "MAUVE"}
READ = {
    CURVES["gen_ppl"]: "Lower: likelier to the judge.",
    CURVES["entropy"]: "Higher: more varied within a text.",
    CURVES["mauve"]: "Higher: closer to real text.",
}
WRITTEN, CONTINUED = ("gen_ppl", "entropy"), ("cond_gen_ppl", "cond_entropy", "cond_mauve")
PAPER = {
    "lm1b": ((paper.TABLE_4, ("gen_ppl",)), (paper.TABLE_5, ("entropy",))),
    "owt": ((paper.TABLE_6, WRITTEN), (paper.TABLE_7, CONTINUED)),
    "owt-860m": ((paper.TABLE_9, WRITTEN), (paper.TABLE_10, CONTINUED)),
}
"""The paper's tables of an experiment, and our metrics to show beside them."""
COST = {
    "all positions of a step (nats a sequence)": ("step_error", "step_correlation", "total correlation of the text"),
    "pairs of neighbours (nats a pair)": ("pair_error", "pair_bound", "bound of Theorem 4.1"),
}


@sections.register("quality")
def quality(results: Results) -> list[Section]:
    """Perplexity, entropy and MAUVE over steps, by every judge, and tables of what else was measured."""
    own = set(results.recipe.stages) if results.recipe is not None else set()
    parts = [
        section
        for number, judge in enumerate(results.judges)
        for section in quality_by(results.plain, judge, number, own)
    ]
    return [replace(parts[0], highlights=highlights(results.main), printed=True), *parts[1:]] if parts else []


def quality_by(rows: list[Row], judge: str | None, number: int, own: set[str]) -> list[Section]:
    """Curves and tables under one judge, the `number`-th of the page; rows without a judge come with the first. own:
    the run's stages, one of which the judge may be. Several masks of a kind under one method get a section of their
    own."""
    every, rows = read_by(rows, judge), usual(read_by(rows, judge))
    panels = {title: curves(rows, metric) for metric, title in CURVES.items() if not number or metric == "gen_ppl"}
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        return []
    samples = sorted({row.n for row in rows if row.metric in CURVES})
    mauve = ", of MAUVE the spread over clusterings" if CURVES["mauve"] in panels else ""
    text = f"{' or '.join(f'{n:,}' for n in samples)} samples a point; bars are standard errors over samples{mauve}. "
    trained = ", a model that this run trained on the same text" if judge in own else ""
    text += f"Judge: {judge}{trained}." if judge else "No judge."
    nth, by = ("", "") if not number else (f"-{number + 1}", f", by {judge}")
    pictures = [_picture(f"steps-{place}{nth}", *panel) for place, panel in enumerate(panels.items(), 1)]
    sections = [Section(f"Quality over steps{by}", text, [Beside(pictures), *_tables(rows, number)])]
    for place, (method, masks) in enumerate(several_masks(every).items(), 1):
        metric = "gen_ppl" if any(row.metric == "gen_ppl" for row in masks) else "entropy"
        picture = _picture(f"masks-{place}{nth}", CURVES[metric], curves(masks, metric))
        sections.append(
            Section(f"{method_in_words(method)}: masks compared{by}", "", [Beside([picture]), *_tables(masks, number)])
        )
    return sections


def _picture(name: str, title: str, lines: plots.Measured) -> Picture:
    plot = plots.over_steps(title, lines, log=title == CURVES["gen_ppl"])
    return Picture(name, plots.svg(plot), f"{title[0].upper()}{title[1:]} over the number of steps. {READ[title]}")


def _tables(rows: list[Row], number: int) -> list[Part]:
    """The tables under one judge: perplexities, their ratios, and with the first judge everything else."""
    compared = ratio_table(rows)
    return [step_table(rows), *([compared] if compared else []), *(other_figures(rows) if not number else [])]


def usual(rows: list[Row]) -> list[Row]:
    """Rows of one mask for each method and model: that of the most students, the first of several such."""
    students: dict[tuple[str, str], dict[str, set[int | None]]] = {}
    for row in rows:
        students.setdefault((row.method, row.model), {}).setdefault(row.mask, set()).add(row.seed)
    mask_of = {place: max(masks, key=lambda mask: len(masks[mask])) for place, masks in students.items()}
    return [row for row in rows if row.mask == mask_of[row.method, row.model]]


def several_masks(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each method that was measured with several masks of one kind."""
    masks: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        masks.setdefault((row.method, row.model), set()).add(row.mask)
    methods = dict.fromkeys(method for (method, _), names in masks.items() if len(names) > 1)
    return {method: [row for row in rows if row.method == method] for method in methods}


def curves(rows: list[Row], metric: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Model in words → steps → the mean over seeds and its standard error."""
    groups: dict[str, dict[int, list[Row]]] = {}
    name_of = row_names(rows)
    for row in rows:
        if row.metric == metric and row.temperature == 1.0:
            groups.setdefault(name_of(row), {}).setdefault(row.steps, []).append(row)
    return {name: {steps: _mean(seeds) for steps, seeds in points.items()} for name, points in groups.items()}


def _one_row_a_seed(rows: list[Row], metric: str) -> dict[int | None, list[Row]]:
    """Rows of a metric that is the same for every model: one a seed, for each value of `first` (None: all of a
    text)."""
    one_a_seed = list({(row.seed, row.first): row for row in rows if row.metric == metric}.values())
    return {first: [row for row in one_a_seed if row.first == first] for first in firsts(one_a_seed)}


def _mean(rows: list[Row]) -> tuple[float, float]:
    """The mean over seeds and its standard error: from the values' own errors or from the spread of seeds, whichever is
    larger. What is the same for every seed, as real text is, counts once."""
    values, n = [row.value for row in rows], len(rows)
    mean = sum(values) / n
    if max(values) == min(values):
        return mean, rows[0].stderr or 0.0
    own = sum((row.stderr or 0) ** 2 for row in rows) ** 0.5 / n
    apart = (sum((value - mean) ** 2 for value in values) / (n - 1) / n) ** 0.5
    return mean, max(own, apart)


def step_table(rows: list[Row]) -> Table:
    """The table of generative perplexity (entropy): a row a model, a column a step count, as the paper prints them."""
    ppl, entropy = (curves(rows, metric) for metric in ("gen_ppl", "entropy"))
    steps = sorted({k for points in (ppl or entropy).values() for k in points})
    real = _one_row_a_seed(rows, "real_ppl")
    kind = "training" if any(row.split == "train" for some in real.values() for row in some) else "held-out"
    figures = "; ".join(
        figure(*_mean(some)) + (first_in_words(first) if len(real) > 1 else "") for first, some in real.items()
    )
    note = f"Real {kind} text under the same judge: {figures}." if real else ""
    title = "Generative perplexity (entropy in nats)" if ppl else "Entropy (nats)"
    name_of = row_names(rows)
    seen = {(name_of(row), row.seed, row.sample_seed) for row in rows}
    seeds = {name: sum(name == other for other, *_ in seen) for name in ppl or entropy}
    has_several = max(seeds.values(), default=1) > 1
    if has_several:
        note += " Means over seeds, where there are several."
    columns = ("model", *(("seeds",) if has_several else ()), *map(steps_in_words, steps))
    table = Table(title, columns, note=note.strip())
    for name in ppl or entropy:
        cells = []
        for k in steps:
            spread = (
                f"{entropy[name][k][0]:.2f}" if k in entropy.get(name, {}) else "–" if k in ppl.get(name, {}) else ""
            )
            cells.append(f"{_perplexity_in_words(ppl[name][k][0])} ({spread})" if k in ppl.get(name, {}) else spread)
        table.rows.append((name, *((str(seeds[name]),) if has_several else ()), *cells))
    return table


def _perplexity_in_words(perplexity: float) -> str:
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.1f}"


def other_figures(rows: list[Row]) -> list[Part]:
    """Other metrics than perplexity and entropy: those that do not depend on steps, and those that do, by metric."""
    once = Table("Figures that do not depend on steps", ("metric", "model", "value"))
    shared, apart = list[tuple[str, ...]](), list[tuple[str, ...]]()
    steps = sorted({row.steps for row in rows if row.metric not in metrics or metrics[row.metric].steps})
    for metric, first in dict.fromkeys((row.metric, row.first) for row in rows if row.metric not in WRITTEN):
        lines = curves([row for row in rows if row.first == first], metric)
        words = metric_in_words(metric) + first_in_words(first)
        values = {tuple((k, round(value, 9)) for k, (value, _) in points.items()) for points in lines.values()}
        is_shared = len(lines) > 1 and len(values) == 1  # a property of the text, or of a shared teacher
        lines = {"all": next(iter(lines.values()))} if is_shared else lines
        if metric in metrics and not metrics[metric].steps:
            once.rows.extend((words, name, figure(*next(iter(points.values())))) for name, points in lines.items())
            continue
        cells = {name: [figure(*points[k]) if k in points else "" for k in steps] for name, points in lines.items()}
        if is_shared:
            shared.append((f"{words}, all", *cells["all"]))
        else:
            apart.append((words, *("" for _ in steps)))
            apart += [(name, *mine) for name, mine in cells.items()]
    names = ", ".join(dict.fromkeys(row.metric for row in rows if row.metric not in WRITTEN))
    over = Table(
        "Other figures", ("model", *map(steps_in_words, steps)), [*shared, *apart], f"In results.jsonl: {names}."
    )
    return [table for table in (once, over) if table.rows]


@sections.register("equal-entropy")
def at_equal_entropy(results: Results) -> list[Section]:
    """Perplexities over those of the teacher in many steps at the same entropy, where it was measured at enough
    temperatures: against its frontier, and against the lower envelope over top-p."""
    rows = results.reported
    parts: list[Part] = []
    for number, judge in enumerate(results.judges):
        tables = [table for envelope in (False, True) for table in equal_entropy_tables(rows, judge, envelope)]
        by = f", by {judge}" if number else ""
        parts += [replace(table, title=table.title + by) for table in tables]
    beside = variety_table(rows)
    parts += [beside] if beside is not None else []
    words = (
        "Each perplexity as a multiple of what the teacher has in many steps at the same entropy, log-linearly between "
        "its temperatures: 1 is as good as the teacher when it takes its time. Small differences of entropy count: the "
        "frontier is steep."
    )
    return [Section("At equal entropy", words, parts, printed=True)] if parts else []


@sections.register("frontier")
def frontier(results: Results) -> list[Section]:
    """Perplexity against entropy over temperatures: a model that is merely less varied moves along its own curve. Only
    if several temperatures were measured."""
    rows = read_by(results.reported, results.judges[0])
    varied, likely = _one_row_a_seed(rows, "real_entropy"), _one_row_a_seed(rows, "real_ppl")
    goals = {first: (_mean(varied[first])[0], _mean(likely[first])[0]) for first in varied if first in likely}
    pictures, has_goal = list[Picture](), False
    for steps, first in sorted({(row.steps, row.first) for row in rows}, key=lambda place: (place[0], place[1] or 0)):
        panel = _panel([row for row in rows if (row.steps, row.first) == (steps, first)])
        if any(len(points) > 1 for points in panel.values()):
            title, goal = steps_in_words(steps) + first_in_words(first), goals.get(first)
            plot = plots.svg(plots.frontier(title, panel, goal))
            pictures.append(Picture(f"frontier-{len(pictures) + 1}", plot, f"Perplexity over entropy in {title}"))
            has_goal = has_goal or goal is not None
    if not pictures:
        return []
    words = "Each point is a temperature, the lowest and the highest named beside it. Lower is likelier to the judge, "
    words += "further right is more varied"
    words += "; the star is real held-out text." if has_goal else "."
    if not any(Frontier.of(rows, judge=judge) for judge in {row.judge for row in rows}):
        words += f" A comparison at equal entropy needs the teacher at {LEAST} temperatures or more, in one step count."
    return [Section("Perplexity and entropy", words, [Beside(pictures)])]


def _panel(rows: list[Row]) -> dict[str, list[plots.Point]]:
    """Model in words → its points (temperature, entropy, perplexity) by rising temperature."""
    points: dict[tuple[str, float], dict[str, list[Row]]] = {}
    name_of = row_names(rows)
    for row in rows:
        if row.metric in WRITTEN:
            points.setdefault((name_of(row), row.temperature), {}).setdefault(row.metric, []).append(row)
    panel: dict[str, list[plots.Point]] = {name: [] for name, _ in points}
    for (name, temperature), by_metric in sorted(points.items(), key=lambda place: place[0][1]):
        if len(by_metric) == 2:
            panel[name].append((temperature, _mean(by_metric["entropy"])[0], _mean(by_metric["gen_ppl"])[0]))
    return {name: line for name, line in panel.items() if line}


@sections.register("steps")
def cost_of_steps(results: Results) -> list[Section]:
    """The factorization error on held-out text, with the lower bound for one factorized distribution a step."""
    panels, rows = {}, results.main
    for title, (error, floor, name) in COST.items():
        lines, floors = curves(rows, error), curves(rows, floor)
        if lines:
            same = len({tuple(points.items()) for points in floors.values()}) == 1  # models that share their teacher
            floors = {name: next(iter(floors.values()))} if same else {f"{name}, {m}": p for m, p in floors.items()}
            panels[title] = lines | floors
    if not panels:
        return []
    words = (
        "The error of drawing the positions of one step independently, on held-out text: the teacher's joint, by the "
        "chain rule, against the model's distribution of each step. One factorized distribution a step cannot be below "
        "the black floors; a mixture over noise can. For models with noise the values of all positions are upper "
        "bounds, loose where 64 draws are few; pairs need few draws. A student that has overfitted to few pairs "
        "has a larger error on other text."
    )
    black = [name for _, _, name in COST.values()]
    pictures = [
        Picture(
            f"cost-{number}", plots.svg(plots.over_steps(title, panel, floors=black)), f"Factorization error, {title}"
        )
        for number, (title, panel) in enumerate(panels.items(), 1)
    ]
    return [Section("What steps cost", words, [Beside(pictures)])]


def highlights(rows: list[Row]) -> list[tuple[str, str]]:
    """The gain of the infinite mask over the single one at few steps, under the same distillation."""
    every = [ratio for ratio in ratios(usual(rows)) if ratio.mask.startswith("infinite")]
    most = max((ratio.seeds for ratio in every), default=1)  # the last of the methods with the most students
    method = next((ratio.method for ratio in reversed(every) if ratio.seeds == most), "")
    gains = [ratio for ratio in every if ratio.method == method]
    return [
        (
            f"{ratio.value:.2f}",
            f"({ratio.low:.2f}–{ratio.high:.2f}) of the single mask's perplexity with infinite masks, "
            f"{method_in_words(ratio.method)}, {steps_in_words(ratio.steps)}",
        )
        for ratio in gains[:3]
    ]


@sections.register("paper")
def paper_beside(results: Results) -> list[Section]:
    """The paper's tables of this experiment with our columns added."""
    parts: list[Part] = []
    for table, measured in PAPER.get(results.recipe.experiment, ()) if results.recipe is not None else ():
        ours = {
            f"{name}, {metric_in_words(metric)}": points
            for metric in measured
            for name, points in curves(results.main, metric).items()
        }
        beside = Table(f"Table {table.number}. {table.caption}", (*table.columns, *(f"ours: {name}" for name in ours)))
        for cells in table.rows:
            mine = [f"{p[int(cells[0])][0]:.2f}" if int(cells[0]) in p else "–" for p in ours.values()]
            beside.rows.append((*cells, *mine))
        if ours:
            parts.append(beside)
    return [Section("The paper's figures, and ours", "", parts)] if parts else []


@sections.register("choices")
def choices(results: Results) -> list[Section]:
    """The rows on which settings were chosen, apart from those reported."""
    words = "Measured on samples of their own, which are in no other figure of this page."
    return [Section("What settings were chosen on", words, [step_table(results.tried)])] if results.tried else []
