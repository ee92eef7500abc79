"""One loop for pretraining and every distillation: rows → objective → optimiser → averages, on Accelerate."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from imdm import models
from imdm.core.config import digest
from imdm.core.devices import accelerator, of_all, together, working_together
from imdm.core.errors import UserError, check_function, check_is, check_seed, check_whole
from imdm.core.files import append_line, as_path, write_text, written_aside
from imdm.core.stopping import StopRequest
from imdm.core.streams import SideStream, sent
from imdm.data.source import Order, Source, check_teaches
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.models.identity import fingerprint
from imdm.models.sharding import Sharding, gathered, reshard, whole_model, whole_on_first
from imdm.objectives import STUDENT, Objective, Step
from imdm.training import checkpoint, history, recording
from imdm.training.agreement import Agreement
from imdm.training.config import NEUTRAL_SETTINGS, TrainConfig
from imdm.training.ema import applied
from imdm.training.history import read_history
from imdm.training.lora import add_adapters, has_adapters, merged
from imdm.training.network import TrainedNetwork, network_settings, other_networks, still
from imdm.training.recording import Recorder, tensors_in

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows. loss: None before the student's first update; doing: in words, an evaluation that
    begins now; empty while it trains."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float
    doing: str = ""


TELL = 2.0  # seconds after which progress is shown again between two lines of the history


Watch = Callable[["MaskedDiffusionLM"], Mapping[str, float]]


class Trainer:
    """Trains `model` on `source` under `objective` and leaves in `out`:

    `model/` the averaged weights, `raw/` the last ones, `checkpoints/` (which carry `recipe`, the settings that made
    them), and `history.jsonl`: the loss every `log_every` steps; every `watch_every` what `watch` measures and the
    objective's early signals, with a warning once they predict a failure. `networks` holds the student and whatever
    else the objective trains, each with its optimiser and average; `model`, `bare`, `optimizer` and `ema` are the
    student's. `on_progress` is called for each logged loss, every few seconds between two of them, and around
    evaluations, `on_warning` with a sentence for the user. `start` is the teacher that the objective begins with: the
    model that the student was made from, unless a stage names another. A stopped run resumes from its newest
    checkpoint, bit for bit on CPU; a finished one returns at once.
    """

    def __init__(
        self,
        model: MaskedDiffusionLM,
        objective: Objective,
        source: Source,
        config: TrainConfig,
        out: str | Path,
        *,
        seed: int = 0,
        watch: Watch | None = None,
        watch_every: int = 100,
        recipe: Mapping[str, Any] | None = None,
        start: MaskedDiffusionLM | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        check_is("model", model, torch.nn.Module, "a model")
        check_is("objective", objective, Objective, "an objective")
        check_is("source", source, Source, "rows to train on")
        check_is("config", config, TrainConfig, "a TrainConfig")
        check_seed(seed)
        check_whole("watch_every", watch_every)
        check_is("recipe", recipe, (Mapping, type(None)), "settings")
        check_is("start", start, (torch.nn.Module, type(None)), "a model")
        for name, function in (("watch", watch), ("on_progress", on_progress), ("on_warning", on_warning)):
            check_function(name, function)
        self.objective, self.source, self.config, self.seed = objective, source, config, seed
        self.out = as_path(out, "out")
        self.watch, self.watch_every, self.recipe = watch, watch_every, recipe or {}
        self.on_progress, self.on_warning = on_progress, on_warning
        self.accelerator = accelerator()
        self._check(model)
        identity = fingerprint(model)
        model.set_policies()  # a policy belongs to the objective that chose it
        objective.prepare(model, source)
        if config.dropout is not None:
            model.set_dropout(config.dropout)
        others = other_networks(objective, model, start, seed)
        configs = {name: config.changed(f"networks.{name}", one.settings()) for name, one in others.items()}
        self.run = self._run_hash(identity, [*network_settings(others)])
        _adapt([(model, config), *((one.module, configs[name]) for name, one in others.items())], seed)
        self.process, self.order = model.process, Order(seed, len(source))
        self.recorder = self._recorder()
        recorded = self.recorder is not None
        world, half = self.accelerator.num_processes, config.precision == "bf16"
        self.sharding = Sharding.of(config.shard, world, self.accelerator.device, half)
        student = TrainedNetwork(STUDENT, model, config, self.accelerator, recorded, self.sharding)
        self.networks = {STUDENT: student}
        for name, one in others.items():
            self.networks[name] = TrainedNetwork(
                name, one.module, configs[name], self.accelerator, recorded, self.sharding
            )
        self.model, self.optimizer, self.ema = student.model, student.optimizer, student.ema
        self.bare: MaskedDiffusionLM = student.bare
        self._updates(0)  # refuse wrong ones now
        objective.check_steps(config.steps)
        self.companion = objective.companion(self.bare, start)
        self.side_stream = SideStream(self.accelerator.device)
        self.step = 0

    def _run_hash(self, identity: str, networks: list[Any]) -> str:
        """A hash of what decides every number of a run: the model it begins with, data, objective and settings."""
        neutral = NEUTRAL_SETTINGS | {"weights"}
        if not self.config.decay:  # which depends on the number of steps
            neutral |= {"steps"}
        settings = {name: value for name, value in self.config.hashed().items() if name not in neutral}
        looks = [self.watch_every] if self.objective.heeds_looks else []
        decisive = [settings, self.objective.hashed(), identity, self.source.fingerprint, self.seed, *networks, *looks]
        return digest(decisive)

    def _check(self, model: MaskedDiffusionLM) -> None:
        sample = self.source.rows(torch.zeros(1, dtype=torch.int64))
        lacking = [name for name in self.objective.needs if name not in sample]
        if lacking:
            raise UserError(
                f"objective {self.objective.kind!r} needs the column {lacking[0]!r}, which its data does not have; "
                "use a coupling as data"
            )
        self.objective.check(model.process.noisy)
        self.objective.check_reading(model.config.causal)
        if self.config.opening and not model.backbone.opens:
            raise UserError(
                f"training.opening = {self.config.opening}: only a causal model of backbone 'hf' that becomes a "
                "diffusion model has attention to open; leave it out"
            )
        if self.config.opening and self.config.graphs:
            raise UserError("training.opening and training.graphs: a captured step has fixed attention; leave one out")
        if self.config.opening:
            model.backbone.check_opening()
        check_teaches(self.source, model.config)
        self.config.check(self.accelerator.num_processes, self.accelerator.device)

    def _recorder(self) -> Recorder | None:
        """What captures steps as CUDA graphs, if that is requested and possible."""
        alone = self.accelerator.distributed_type == "NO" and self.accumulation == 1
        if not (self.config.graphs and self.objective.recordable and alone):
            return None
        graphs = recording.graphs_on(self.accelerator.device)
        return None if graphs is None else Recorder(graphs)

    @property
    def accumulation(self) -> int:
        return self.config.accumulation(self.accelerator.num_processes)

    def slots(self, micro: int) -> Tensor:
        """This process' indices in the global batch for one micro-batch: interleaved, so that each covers all times."""
        stride = self.accelerator.num_processes * self.accumulation
        first = self.accelerator.process_index * self.accumulation + micro
        return torch.arange(first, self.config.batch, stride)

    def batch(
        self, micro: int, update: int = 0, updated: tuple[str, ...] = (STUDENT,)
    ) -> tuple[dict[str, Tensor], Step]:
        """Rows, and the result of `Objective.start` for them."""
        slots, device = self.slots(micro), self.accelerator.device
        rows = self.source.rows(self.order(self.step * self.config.batch + slots))
        with self.side_stream:
            batch = {name: sent(column, device) for name, column in rows.items()}
            step = Step(self.seed, self.step, sent(slots, device), self.config.batch, None, update, updated)
            step = replace(step, companion=self.companion, fill=self.recorder is not None)
            step = replace(step, start=self.objective.start(self.process, batch, step))
        self.side_stream.hand_over(tensors_in((batch, step.slots, step.start)))
        return batch, step

    def train_step(self) -> Tensor:
        """One step: all updates of the objective. Returns the student's loss over the global batch; if the student is
        not updated, that of the last network that is."""
        with nullcontext() if self.recorder is None else self.recorder.graphs.aside():
            # Whatever replaces tensors comes first: a new round's teacher, an optimiser without its moments. Graphs
            # captured before read memory that is no longer used, so they are dropped here and never within a step.
            # A rate changes at every step, so graphs read it from a tensor (`TrainedNetwork.set_rate`).
            renewed = self.objective.turn(self.companion, self.step, self.ema.weights)
            if renewed:
                self.optimizer.state.clear()
            if self.recorder is not None and (renewed or self.recorder.under != self._graph_key()):
                self.recorder.forget(self._graph_key(), self._cached_tables())
            for name, network in self.networks.items():
                own = self.objective.lr_factor(self.companion) if name == STUDENT else 1.0
                network.lr_factor = own * self.config.lr_factor(self.step)
            self._open()
            losses: dict[str, Tensor] = {}
            for number, names in enumerate(self._updates(self.step)):
                losses |= self._update(number, names)
            # A network that only ran forward may still have its weights gathered: they would be stale after the next
            # update, and take memory meanwhile.
            for each in self._models() if self.sharding is not None else ():
                reshard(each)
        self.step += 1
        return losses.get(STUDENT, [*losses.values()][-1])

    def _open(self) -> None:
        """Set how far the student's attention is open in this step."""
        if self.config.opening:
            key = fold(as_key(self.seed), Purpose.OPENING, self.step)
            self.bare.backbone.open_attention(min(1.0, self.step / self.config.opening), key)

    def _graph_key(self) -> Hashable:
        """What a captured step is valid for."""
        training = tuple(network.bare.training for network in self.networks.values())
        return training, self.objective.graph_key(self.companion)

    def _models(self) -> list[torch.nn.Module]:
        """All networks, and the companion's."""
        networks = [network.bare for network in self.networks.values()] + [getattr(self.companion, "model", None)]
        return [model for model in networks if isinstance(model, torch.nn.Module)]

    def _cached_tables(self) -> list[Any]:
        """What captured steps read beside weights and rows: cached tables that might be evicted."""
        denoisers = [model for model in self._models() if isinstance(model, models.Network)]
        device = self.accelerator.device
        return [model.backbone.beside(self.source.length + model.config.mixture, device) for model in denoisers]

    def _updates(self, step: int) -> list[tuple[str, ...]]:
        """The updates of a step, each the networks that it moves; refuses unknown ones."""
        updates = [tuple(names) for names in self.objective.updates(step)]
        for names in updates or [()]:
            if not names or len(set(names)) < len(names) or not set(names) <= set(self.networks):
                raise UserError(
                    f"objective {self.objective.kind!r} has at step {step} the updates {updates}; "
                    f"each names one or more of {', '.join(self.networks)}"
                )
        return updates

    def _update(self, number: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """One update of these networks, all others unchanged; returns their losses over the global batch."""
        moved = [self.networks[name] for name in names]
        if self.recorder is not None:
            total = self._replay(self.recorder, number, names)
        else:
            total = torch.zeros(len(names), device=self.accelerator.device)
            with self._only_training(names):
                # Gradients add up over micro-batches, each divided by their number (`_gradients`), and processes
                # average them only with the last one. Sharded networks reduce theirs each time: a process may
                # have no room for a whole gradient.
                for micro in range(self.accumulation):
                    batch, step = self.batch(micro, number, names)
                    with ExitStack() as waiting:
                        later = self.sharding is None and micro < self.accumulation - 1
                        for network in moved if later else ():
                            waiting.enter_context(self.accelerator.no_sync(network.model))
                        total += self._gradients(batch, step)
                for network in moved:
                    network.update()
        losses = self.accelerator.reduce(total, reduction="mean").unbind()
        for network, loss in zip(moved, losses, strict=True):
            network.losses.append(loss)
        return dict(zip(names, losses, strict=True))

    def _gradients(self, batch: Mapping[str, Tensor], step: Step) -> Tensor:
        """Accumulate the gradients of one micro-batch in the updated networks; returns their losses."""
        updated = step.updated
        modules = {name: one.model if name in updated else one.bare for name, one in self.networks.items()}
        model = modules.pop(STUDENT)
        with self._precision():
            result = self.objective.loss(model, self.process, batch, replace(step, networks=modules), self.companion)
            losses = [loss / self.accumulation for loss in self._by_name(result, updated)]
        self.accelerator.backward(sum(losses[1:], losses[0]))
        return torch.stack([loss.detach() for loss in losses])

    def _only_training(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Inside this block only these networks get gradients."""
        return still(network for name, network in self.networks.items() if name not in names)

    def _replay(self, recorder: Recorder, number: int, names: tuple[str, ...]) -> Tensor:
        """One update as a CUDA graph: gradients and optimiser step. The EMA, whose decay changes, is updated after
        it."""
        batch, step = self.batch(0, number, names)
        index = torch.full((), self.step, device=self.accelerator.device)
        moved = [self.networks[name] for name in names]

        def run(inputs: Any) -> Tensor:
            batch, slots, index, start = inputs
            with self._only_training(names):
                total = self._gradients(batch, replace(step, slots=slots, index=index, start=start))
            for network in moved:
                network.step()
            return total

        # The rate is set before the replay, in the tensor that the graph reads. The average is updated after it, as
        # its decay is a number of Python's, which a graph would keep as it was when captured.
        for network in moved:
            network.set_rate()
        total = recorder((number, names), (batch, step.slots, index, step.start), run)
        for network in moved:
            network.ema.update()
        return total

    def _by_name(self, losses: Tensor | Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        """A loss for each of these networks, in their order."""
        if isinstance(losses, Tensor) and len(names) == 1:
            return [losses]
        if not isinstance(losses, Mapping) or set(losses) != set(names):
            what = f"those of {', '.join(losses)}" if isinstance(losses, Mapping) else "one for all"
            raise UserError(
                f"objective {self.objective.kind!r} returned losses ({what}) that do not match the update; "
                f"it needs one for each of {', '.join(names)}"
            )
        return [losses[name] for name in names]

    def _precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: bf16 where it is fast; weights, norms, softmax and optimiser stay in float32.
        Not Accelerate's own, which is global to the process: the stages of a recipe may differ."""
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.accelerator.device.type, torch.bfloat16)

    def train(self) -> Path:
        """Train to the end; returns the folder of the finished model. Ctrl-C or SIGTERM finishes the step (with several
        processes, one or two more) and writes a checkpoint; a second Ctrl-C stops a single process at once."""
        alone = self.accelerator.num_processes == 1
        if self.on_warning is not None:
            for warning in self._warnings(alone):
                self.on_warning(warning)
        with working_together(self.out):
            self.resume()
            request = StopRequest()
            agreed = Agreement(request, self.accelerator.device, alone)
            with request.listening(hasty=alone):
                folder = self._train(agreed)
                agreed.at_last()
        request.end()
        return folder

    def _warnings(self, alone: bool) -> Iterator[str]:
        """Warnings of settings that are allowed, but hardly meant."""
        config, source = self.config, self.source
        if alone and config.shard != "none":
            yield (
                f"training.shard = {config.shard!r}: there is one process, so nothing is sharded; start several with "
                "torchrun"
            )
        if config.warmup > 1 and 2 * config.warmup > config.steps:
            yield (
                f"training.warmup = {config.warmup:,}: the learning rate rises to its value over so many steps, and "
                f"there are {config.steps:,}; a tenth of these is usual"
            )
        if source.length < self.bare.config.length:
            yield (
                f"the rows have {source.length:,} tokens, and the model writes {self.bare.config.length:,} unless told "
                f"otherwise (--length); beyond {source.length:,} it is not trained here"
            )

    def _train(self, agreed: Agreement) -> Path:
        writer = self._tensorboard()
        for network in self.networks.values():
            network.model.train()
            network.losses = []
        started, steps = time.perf_counter(), 0
        loss: float | None = None
        last_report, speed = started, 0.0
        while self.step < self.config.steps and not self.objective.ended(self.companion, self.step):
            self.train_step()
            steps += 1
            if any(map(self._due, (self.config.log_every, self.config.checkpoint_every, self.watch_every))):
                losses = self._losses()
                loss = losses.get("loss", loss)
            if self._due(self.watch_every):
                paused = time.perf_counter()
                speed = speed or self._tokens(steps / (paused - started))
                self._tell(loss, speed, self._eval_note())
                self._evaluate_now(writer)  # may end the run
                self._tell(loss, speed)
                last_report = time.perf_counter()
                started += last_report - paused
            if self._due(self.config.log_every):
                rate = steps / (time.perf_counter() - started)  # steps a second
                speed = self._tokens(rate)
                figures = {**losses, "tokens_per_second": round(speed), "steps_per_second": round(rate, 3)}
                self._record({"step": self.step, **figures}, writer)
                self._tell(loss, speed)
                started, steps = time.perf_counter(), 0
                last_report = started
                for network in self.networks.values():
                    network.losses = []
            elif self.on_progress is not None and (now := time.perf_counter()) - last_report > TELL:
                last_report, speed = now, self._tokens(steps / (now - started))
                self._tell(loss if loss is not None else self._losses().get("loss"), speed)
            stop = agreed()
            if stop or self._due(self.config.checkpoint_every):
                self.save()
            if stop:
                agreed.request.end()
        self.export()
        if writer is not None:
            writer.close()
        return self.out / "model"

    def _tokens(self, rate: float) -> float:
        """Tokens a second, from steps a second."""
        return rate * self.config.batch * self.source.length

    def _tell(self, loss: float | None, speed: float, doing: str = "") -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(self.step, self.config.steps, loss, speed, doing))

    def _eval_note(self) -> str:
        """What the next evaluation does, in words; nothing where it takes no time."""
        words = self.objective.looking(self.companion, self.source.length)
        return f"evaluating: {words}" if words else "evaluating" if self.watch is not None else ""

    def _losses(self) -> dict[str, float]:
        """The mean loss of each network that was updated since the last line of the history: `loss` the student's,
        `loss_NAME` another's. NaN or infinity is refused, before it gets into a checkpoint."""
        losses = {}
        for name, network in self.networks.items():
            mean = network.mean_loss()
            if mean is None:
                continue
            if not math.isfinite(mean):
                whose, rate = ("", "training.lr") if name == STUDENT else (f" of {name!r}", "its rate, lr")
                raise UserError(f"the loss{whose} is {mean} at step {self.step}; lower {rate} = {network.config.lr}")
            losses["loss" if name == STUDENT else f"loss_{name}"] = mean
        return losses

    def _evaluate_now(self, writer: Any) -> None:
        """Log the objective's early signals and the measurements of `watch`, and warn if they predict a failure. Only
        networks that these run are gathered: a model that is sharded need not fit a process."""
        if self.watch is None and not self.objective.has_signals:
            return
        needed = self._models() if self.objective.has_signals else [self.bare]
        with self.averaged(), gathered(needed), self._precision():
            others = {name: one.bare for name, one in self.networks.items() if name != STUDENT}
            signals = self.objective.signals(self.bare, self.source, self.seed, self.companion, others)
            seen = signals | dict(self.watch(self.bare) if self.watch is not None else {})
        if not seen:
            return
        passes = {"passes": round(self.step * self.config.batch / len(self.source), 2)} if signals else {}
        self._record({"step": self.step, **passes, **seen}, writer)
        if not signals or not self.accelerator.is_main_process:
            return
        rows = read_history(self.out)
        seen_before = [(row["step"], row) for row in rows if signals.keys() <= row.keys()]
        fear = self.objective.worry(seen_before, self.config.steps)
        if fear is not None and not any("warning" in row for row in rows):
            self._record({"step": self.step, "warning": fear}, None)
            if self.on_warning is not None:
                self.on_warning(fear)

    def _due(self, every: int) -> bool:
        last = self.step == self.config.steps or self.objective.ended(self.companion, self.step)
        return self.step % every == 0 or last

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Averaged weights and no dropout inside this block; both are restored after it."""
        training = self.bare.training
        with self.ema.applied(self.bare):
            self.bare.eval()
            try:
                yield
            finally:
                self.bare.train(training)

    def _record(self, row: dict[str, Any], writer: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        append_line(self.out / history.FILE, row)
        if writer is not None:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])

    def _tensorboard(self) -> Any:
        if not self.config.tensorboard or not self.accelerator.is_main_process:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("training.tensorboard = true needs the extra: pip install 'imdm[tensorboard]'") from None
        return SummaryWriter(self.out / "tensorboard")

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint: all processes gather, the first one writes, the others wait for it."""
        networks = {name: network.state() for name, network in self.networks.items()}
        first = self.accelerator.is_main_process
        companion, values = {}, {}
        if self.companion and (first or self.sharding is not None):
            companion, values = self.companion.tensors(), self.companion.values()
        if self.sharding is not None:
            companion = whole_on_first(companion)
        if first:
            point = checkpoint.Checkpoint(self.step, self.run, self.recipe, values, companion, networks)
            checkpoint.save(self.checkpoints, point, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Resume from the newest checkpoint of this run, if there is one: the newest that the first process sees."""
        self.accelerator.wait_for_everyone()
        present = of_all(checkpoint.steps_present(self.checkpoints))[0]
        if not present:
            self._forget_history()
            return
        with together():
            point = self._newest(present[-1])
        if self.recorder is not None:
            self.recorder.forget()  # loaded tensors may be at other addresses
        with together():
            for name, network in self.networks.items():
                network.load(point.networks[name])
            if self.companion:
                self.companion.load(point.companion, point.companion_values)
        self.step = point.step
        self._forget_history()

    def _newest(self, step: int) -> checkpoint.Checkpoint:
        """The checkpoint of this step; refused if it is not of this run, or beyond its end."""
        path = checkpoint.checkpoint_path(self.checkpoints, step)
        point = checkpoint.load(path, self.run, list(self.networks), self.recipe)
        if point.step > self.config.steps:
            raise UserError(
                f"checkpoint {str(path)!r} is at step {point.step}, beyond training.steps = {self.config.steps}; "
                f"set training.steps to at least {point.step}, or choose another folder"
            )
        return point

    def _forget_history(self) -> None:
        """Drop lines beyond the step that is resumed from; they will be written again."""
        path = self.out / history.FILE
        if self.accelerator.is_main_process and path.exists():
            rows = [row for row in read_history(self.out) if row["step"] <= self.step]
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def export(self) -> None:
        """Write the finished models, `raw/` and `model/` (averaged), each whole or not there."""
        best = self.objective.best(self.companion)
        for name, weights in (("raw", {}), ("model", self.ema.weights if best is None else best)):
            if self.sharding is not None:
                self._write(name, whole_model(self.bare, weights))
            elif self.accelerator.is_main_process:
                with applied(weights, self.bare):
                    half = self.config.weights != "float32"
                    copied = merged if has_adapters(self.bare) else copy.deepcopy if half else None
                    self._write(name, self.bare if copied is None else copied(self.bare))
        self.accelerator.wait_for_everyone()

    def _write(self, name: str, model: MaskedDiffusionLM | None) -> None:
        """Write a model, if this process has it; the model may be modified."""
        if model is None:
            return
        with written_aside(self.out / name) as aside:
            if self.config.weights != "float32":
                torch.nn.Module.to(model, torch.bfloat16)
            model.save_pretrained(aside)


def _adapt(networks: Iterable[tuple[torch.nn.Module, TrainConfig]], seed: int) -> None:
    """Give networks the adapters and the gradient checkpointing that their settings name."""
    for module, settings in networks:
        if not isinstance(module, models.Network):
            continue
        if settings.lora is not None:
            add_adapters(module, settings.lora, seed)
        if settings.checkpoint_blocks:
            module.backbone.checkpoint_blocks()
