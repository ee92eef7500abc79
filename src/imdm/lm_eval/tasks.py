"""Run lm-eval's tasks by name or file, and collect the results as rows."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from imdm.core.errors import UserError, reason_of
from imdm.lm_eval.model import DiffusionLM

BOOTSTRAPS = 1000  # for metrics whose standard error has no formula


@dataclass(frozen=True)
class Figure:
    """One result of a task or a group of tasks; stderr over its questions, if lm-eval has one; monte_carlo: the mean
    standard error of its log-likelihoods in nats, if it has any."""

    task: str
    metric: str
    value: float
    stderr: float | None
    monte_carlo: float | None


class Tasks:
    """Existing tasks: names of lm-eval's own (or patterns, `blimp_*`), which it downloads, and YAML files."""

    def __init__(self, names: Sequence[str]) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.manager = TaskManager(include_defaults=not all(map(is_file, names)))
        self.names = list(dict.fromkeys(task for name in names for task in self._matching_names(name)))

    def _matching_names(self, name: str) -> list[str]:
        if is_file(name):
            return [name]
        names = self.manager.match_tasks([name])
        if not names:
            near = difflib.get_close_matches(name, self.manager.all_tasks, 3)
            hint = f"did you mean {', '.join(near)}?" if near else "'lm-eval ls tasks' lists them"
            raise UserError(f"unknown task {name!r}: neither a YAML file nor one of lm-eval's; {hint}")
        return names

    def run(
        self, lm: DiffusionLM, limit: int | None = None, fewshot: int | None = None, chat: bool = False
    ) -> dict[str, Any]:
        """lm-eval's results as plain data; limit: only so many questions of each task; fewshot: examples before
        each; chat: questions in the tokenizer's chat template."""
        tasks = [one for name in self.names for one in self._loaded_tasks(name)]
        results = simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=self.manager,
            num_fewshot=fewshot,
            limit=limit,
            log_samples=False,
            bootstrap_iters=BOOTSTRAPS,
            apply_chat_template=chat,
        )
        return json.loads(json.dumps(results or {}, default=handle_non_serializable))

    def _loaded_tasks(self, name: str) -> list[Any]:
        """A task or group with its data; a tag has several."""
        try:
            parts = self.manager.load([name])
        except Exception as error:  # of many kinds: a file that is no task, no network, missing data
            raise UserError(f"task {name!r} cannot be loaded: {reason_of(error)}") from error
        groups = parts["groups"]
        return [groups[name]] if name in groups else list(parts["tasks"].values())


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def figures(results: dict[str, Any]) -> Iterator[Figure]:
    """Every result, in lm-eval's order."""
    errors = results.get("config", {}).get("monte_carlo_stderr_by_task", {})
    for task, values in results.get("results", {}).items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kind}")
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            label = metric if kind == "none" else f"{metric} ({kind})"
            yield Figure(task, label, float(value), stderr, errors.get(task))
