"""Generative perplexity: the perplexity of samples under a causal language model, the judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from imdm.core.devices import check_precision, checked_device
from imdm.core.errors import UserError, is_out_of_memory, reason_of
from imdm.core.files import check_folder, read_json
from imdm.core.hub import hub_for
from imdm.data.statistics import Measurement
from imdm.data.tokenizers import has_tokenizer, load_tokenizer, special_ids, tokenizer_hash
from imdm.diffusion.state import Noised
from imdm.evaluation.base import Evaluation, bootstrap_weights, metric, spread
from imdm.models.identity import is_ours
from imdm.models.loading import load_model
from imdm.shipped import FETCHABLE, fetched, find, meant, names

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

CONTEXT = 1024
DEFAULT = "gpt2-large"
SHIPS = "sentences-judge"  # the fallback if the requested judge is not available and no other shipped one fits better
Precision = Literal["float32", "bf16"]
SAFE: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
"""How models of others are loaded: nothing is unpickled, and no code of theirs is run."""


class NotHereError(UserError):
    """A judge that must be downloaded first, or that is on a hub which cannot be reached."""


@dataclass(frozen=True)
class Score:
    """A judge's scores of n texts: the sum of −log p over the tokens that count, and how many they are: (n,) each,
    float64."""

    nll: Tensor
    count: Tensor

    def perplexity(self) -> float:
        return float((self.nll.sum() / self.count.sum()).exp())


@dataclass(frozen=True)
class Window:
    """A part of a text's ids that is scored in one pass; the first `known` of them are context and do not count."""

    text: int
    ids: list[int]
    known: int


@dataclass
class Judge:
    """A causal language model that scores text.

    begin: an id put before every text that does not begin with it, if the judge was trained so; it does not count. end:
    an id put after every text that has ended; it counts, since it is predicted like any other token. special: whether
    names of special tokens in a text are encoded as these tokens, as for rows of a stream decoded with them; else they
    are ordinary text.
    """

    name: str
    model: Any
    tokenizer: Any
    precision: Precision = "float32"
    begin: int | None = None
    batch_size: int = 8
    context: int = CONTEXT
    end: int | None = None
    special: bool = False

    @property
    def label(self) -> str:
        return labelled(self.name, self.precision)

    @cached_property
    def identity(self) -> list[Any]:
        """All that its scores depend on: two judges of one name may have different weights."""
        return ["judge", self.label, self.begin, weight_sum(self.model)]

    def score(self, texts: list[str], prompts: list[str] | None = None, ended: Sequence[bool] | None = None) -> Score:
        """The judge's score of each text.

        Every token that has one before it counts: all of a text where the judge has a `begin`, else from the second on.
        Of end-of-text tokens only the first counts, others are padding. ended: which texts are complete, so that
        the judge's own `end` is appended and counts. Prompts are context and do not count."""
        contexts = self.ids(prompts) if prompts is not None else [[] for _ in texts]
        written = self.ids(texts)
        if ended is not None and self.end is not None:
            written = [[*ids, self.end] if whole else ids for ids, whole in zip(written, ended, strict=True)]
        return self.score_ids(contexts, written)

    @torch.no_grad()
    def score_ids(self, contexts: list[list[int]], texts: list[list[int]]) -> Score:
        """The judge's score of texts in its own tokens, each after a context, which does not count. Texts longer than
        `context` are scored in windows, whose first token does not count either."""
        windows: list[Window] = []
        for number, (prompt, text) in enumerate(zip(contexts, texts, strict=True)):
            before = [*self.start([*prompt, *text]), *prompt]
            ids = [*before, *text]
            skip = max(1, len(before))
            windows += [
                Window(number, ids[i : i + self.context], max(1, skip - i))
                for i in range(0, len(ids), self.context)
                if len(ids) - i > 1
            ]
        nll, count = torch.zeros(len(texts), dtype=torch.float64), torch.zeros(len(texts), dtype=torch.float64)
        windows.sort(key=lambda window: len(window.ids))  # for little padding
        for first in range(0, len(windows), self.batch_size):
            some = windows[first : first + self.batch_size]
            for window, (loss, tokens) in zip(some, self._losses(some), strict=True):
                nll[window.text] += loss
                count[window.text] += tokens
        return Score(nll, count)

    @torch.no_grad()
    def features(self, texts: list[str]) -> Tensor:
        """The last hidden state at each text's last token: (n, D)."""
        rows = [[*self.start(ids), *ids] for ids in self.ids(texts)]
        windows = [Window(i, ids[: self.context] or [0], 0) for i, ids in enumerate(rows)]
        windows.sort(key=lambda window: len(window.ids))  # for little padding
        out: dict[int, Tensor] = {}
        for first in range(0, len(windows), self.batch_size):
            some = windows[first : first + self.batch_size]
            ids, real = self.padded(some)
            hidden = self.model(input_ids=ids, attention_mask=real, output_hidden_states=True).hidden_states[-1]
            last = hidden[torch.arange(len(some), device=ids.device), real.sum(1) - 1].float().cpu()  # (b, D)
            out |= {window.text: vector for window, vector in zip(some, last, strict=True)}
        return torch.stack([out[i] for i in range(len(texts))])

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Texts in the judge's tokens, without its begin and end tokens."""
        how = {"add_special_tokens": False, "split_special_tokens": not self.special}
        return self.tokenizer(texts, **how)["input_ids"] if texts else []

    def start(self, ids: list[int]) -> list[int]:
        """The tokens to put before these ids."""
        return [] if self.begin is None or ids[:1] == [self.begin] else [self.begin]

    def padded(self, windows: list[Window]) -> tuple[Tensor, Tensor]:
        """Ids (b, T), and 1 where they are real, 0 where they pad at the end."""
        device, longest = next(self.model.parameters()).device, max(len(window.ids) for window in windows)
        ids = torch.full((len(windows), longest), self.tokenizer.eos_token_id or 0)
        real = torch.zeros_like(ids)
        for row, window in enumerate(windows):
            ids[row, : len(window.ids)] = torch.tensor(window.ids)
            real[row, : len(window.ids)] = 1
        return ids.to(device), real.to(device)

    def _losses(self, windows: list[Window]) -> list[tuple[float, int]]:
        """The sum of −log p over each window's tokens that count, and how many they are."""
        end, (ids, real) = self.tokenizer.eos_token_id, self.padded(windows)
        skips = torch.tensor([window.known for window in windows], device=ids.device)
        counted = (real == 1) & (torch.arange(ids.shape[1], device=ids.device) >= skips[:, None])
        log_p = torch.log_softmax(self.model(input_ids=ids, attention_mask=real).logits[:, :-1].float(), -1)
        loss = -log_p.gather(-1, ids[:, 1:, None])[..., 0].double()  # (B, T − 1)
        if end is not None:
            is_end = (ids == end) & counted
            counted &= ~(is_end & (is_end.cumsum(1) > 1))
        return list(zip((loss * counted[:, 1:]).sum(1).tolist(), counted[:, 1:].sum(1).tolist(), strict=True))


def labelled(name: str, precision: str) -> str:
    """A judge's name in result rows, with its precision."""
    return name if precision == "float32" else f"{name} ({precision})"


@dataclass(frozen=True)
class LeftToRight:
    """One of our own causal models with the call signature of `transformers`."""

    model: MaskedDiffusionLM

    def parameters(self) -> Iterator[Tensor]:
        return self.model.parameters()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool = False) -> Any:
        """Padding is at the end, which earlier positions do not attend to."""
        hidden = self.model.trunk(Noised.clean(input_ids))
        logits = self.model.head(hidden.flatten(0, 1)).unflatten(0, input_ids.shape)
        return SimpleNamespace(logits=logits, hidden_states=(hidden,))


def weight_sum(model: Any) -> float:
    """A checksum that distinguishes models of one name."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def load_judge(
    place: str, precision: Precision = "float32", device: str | torch.device = "cpu", name: str | None = None
) -> Judge:
    """A judge by the name of one that ships or was fetched, a folder, a .gguf file or a hub id; called `name` in result
    rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from imdm.models.denoiser import register  # takes seconds, as `transformers` does

    register()
    check_precision(precision, name="precision")
    name, place, device = name or place, str(find(place)), checked_device(device)
    if is_ours(Path(place)):
        return _own_judge(place, precision, device, name)
    if hint := meant(place, FETCHABLE):
        raise UserError(f"judge {name!r}: no such folder; {hint}")
    place = str(fetched(name)) if name in FETCHABLE else place
    if name in FETCHABLE and not fetched(name).exists():
        raise NotHereError(f"judge {name!r} is not here; get it with 'imdm judge fetch {name}'")
    folder, extra = (
        (str(Path(place).parent), {"gguf_file": Path(place).name}) if place.endswith(".gguf") else (place, {})
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    check_folder(Path(folder), f"judge {name!r}")
    try:
        with hub_for(folder):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **extra)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **SAFE, **extra)
    except Exception as error:  # missing, damaged, no network and others
        if is_out_of_memory(error):
            raise
        here = "without a hub: stories-judge or sentences-judge, which ship, or imdm judge fetch smollm2"
        close = meant(name, FETCHABLE, alike=0.6)
        kind = NotHereError if not close and _is_of_a_hub(place) else UserError
        raise kind(f"judge {name!r} cannot be loaded ({reason_of(error)}); {close or here}") from None
    tokenizer.model_max_length = 1 << 40  # long texts are scored in windows
    begin = tokenizer.bos_token_id if name in FETCHABLE else begin_of(tokenizer)
    context = min(CONTEXT, getattr(model.config, "max_position_embeddings", None) or CONTEXT)
    many = 32 if "cuda" in str(device) else 8
    return Judge(name, model.to(device).eval(), tokenizer, precision, begin, many, context, end=tokenizer.eos_token_id)


def _is_of_a_hub(place: str) -> bool:
    """Whether it can only be on a hub: NAME or OWNER/NAME, and nothing of that name is on this machine."""
    path = Path(place)
    is_near = path.exists() or (len(path.parts) == 2 and path.parent.exists())
    return len(path.parts) <= 2 and not path.is_absolute() and not is_near and path.suffix != ".gguf"


def judge_at_hand(tokenizer: Any) -> str:
    """The shipped judge with the text's own tokenizer, if there is one; else `sentences-judge`."""
    own = tokenizer_hash(tokenizer)
    judges = [name for name in names() if read_json(Path(find(name)) / "config.json", "judge").get("causal")]
    return next((name for name in judges if tokenizer_hash(load_tokenizer(name)) == own), SHIPS)


def load_judge_or_other(
    place: str,
    precision: Precision,
    device: str | torch.device,
    *,
    tokenizer: Any,
    say: Callable[[str], None],
    taken: Collection[str] = (),
    name: str | None = None,
) -> Judge:
    """The judge, or, if it is not available, one that ships, with a note about that; never one that is `taken`, since
    it scores the same text already. tokenizer: the text's, None without text. A judge that is present but cannot be
    loaded is an error."""
    try:
        return load_judge(place, precision, device, name)
    except NotHereError:
        other = judge_at_hand(tokenizer) if tokenizer is not None else None
        if other is None or other in taken:
            raise
        judge, get = load_judge(other, precision, device), f"; get it with 'imdm judge fetch {place}'"
        say(f"judge {place!r} is not available; using {judge.label}, which ships, instead{get * (place in FETCHABLE)}")
        return judge


def begin_of(tokenizer: Any) -> int | None:
    """The begin token, if a tokenizer puts one before every text, as its model was then trained (Llama's does, GPT-2's
    does not)."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    added = whole[: len(whole) - len(plain)] if whole[-len(plain) :] == plain else whole[:1]
    return tokenizer.bos_token_id if tokenizer.bos_token_id in added else None


def _own_judge(place: str, precision: Precision, device: str | torch.device, name: str) -> Judge:
    model = load_model(place)
    if not model.config.causal:
        raise UserError(f"judge {name!r} is a diffusion model; one of ours judges if trained by 'autoregressive'")
    if not has_tokenizer(Path(place)):
        raise UserError(f"judge {name!r} has no tokenizer beside it; it was trained on ids and cannot score text")
    torch.nn.Module.to(model.eval(), device, torch.bfloat16 if precision == "bf16" else torch.float32)
    many, tokenizer = 64 if "cuda" in str(device) else 8, load_tokenizer(place)
    special, context = special_ids(tokenizer), model.config.length
    # Rows of a stream contain their begin token as text, which a model of such rows has to generate itself.
    begin = None if model.config.ending is None else special.begin
    return Judge(name, LeftToRight(model), tokenizer, precision, begin, many, context, end=special.end)


def judge_of(evaluation: Evaluation) -> Judge:
    """The judge, for a metric that needs one."""
    if evaluation.subject.judge is None:
        raise UserError(f"text is scored by a judge (the paper's is {DEFAULT}); give one")
    return evaluation.subject.judge


def in_parts(evaluation: Evaluation, what: list[Any], n: int, score: Callable[[list[int]], Score]) -> Score:
    """The judge's score of texts 0…n − 1, in parts; `what` identifies all that it depends on beside the judge."""
    judge = judge_of(evaluation)
    columns = evaluation.subject.parts.collect(
        n, lambda: ["score", judge.identity, *what], lambda part: vars(score(part.tolist()))
    )
    return Score(**columns)


def have_ended(evaluation: Evaluation, rows: Tensor) -> list[bool] | None:
    """Which rows (n, L) contain the end of their text, where rows are whole texts; None where they are cut from a
    stream."""
    ending = evaluation.subject.model.config.ending
    return None if ending is None else ending.finished(rows).tolist()


def perplexity(
    evaluation: Evaluation, texts: list[str], prompts: list[str] | None = None, ended: list[bool] | None = None
) -> Measurement:
    """The judge's perplexity of texts (given their prompts), standard error by bootstrap over texts."""
    judge = judge_of(evaluation)

    def score(some: list[int]) -> Score:
        contexts, whole = ([column[i] for i in some] if column is not None else None for column in (prompts, ended))
        return judge.score([texts[i] for i in some], contexts, whole)  # type: ignore[arg-type]

    what = [texts, prompts, *([] if ended is None else [judge.end, ended])]
    return perplexity_of(evaluation, in_parts(evaluation, what, len(texts), score))


def perplexity_of(evaluation: Evaluation, score: Score) -> Measurement:
    """The perplexity of scored texts, standard error by bootstrap over texts."""
    judge = judge_of(evaluation)
    if not float(score.count.sum()):
        raise UserError("generative perplexity: the texts have no token that counts")
    again = bootstrap_weights(len(score.nll), evaluation.subject.seed)
    replicates = ((again @ score.nll) / (again @ score.count)).exp()
    return Measurement(score.perplexity(), spread(list(replicates)), len(score.nll), judge=judge.label)


@metric("gen_ppl", title="generative perplexity", judge=True)
def generative_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of the samples, decoded with special tokens kept; of whole texts up to their end, which
    counts. Standard error over samples."""
    return perplexity(evaluation, evaluation.texts(), ended=have_ended(evaluation, evaluation.written()[0]))


@metric("real_ppl", title="perplexity of real text", judge=True, reads=("data",), samples=False, steps=False)
def real_perplexity(evaluation: Evaluation) -> Measurement:
    """The judge's perplexity of as many rows of real held-out text: the score of a perfect model."""
    rows = evaluation.held_out()
    measurement = perplexity(evaluation, evaluation.decode(rows), ended=have_ended(evaluation, rows))
    return replace(measurement, split=evaluation.subject.split)
