"""Couplings: (z_t, t, seed) → x̂ pairs made by a teacher, stored as safetensors shards with a manifest.

A folder holds `manifest.json`, which says exactly what made the pairs, and `pairs-00000.safetensors`, … Pair i depends
on the manifest and on i alone, so a run that stopped goes on with the next missing shard, and several processes may
share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from imdm.config import Config, digest
from imdm.data.source import Order, Source, check_fits
from imdm.errors import UserError
from imdm.files import read_json, read_metadata, read_tensors, write_json, written_aside
from imdm.models import MaskedDiffusionLM, fingerprint, in_precision
from imdm.objectives import EARLIEST
from imdm.process import NoisePolicy
from imdm.randomness import GENERATOR, Purpose, as_key, fold, uniform
from imdm.sampling import sample


class CoupleConfig(Config):
    """How couplings are made.

    start   `perturbed`: data corrupted to t ~ U(10⁻³, 1); `prior`: everything masked, t = 1
    noise   what the teacher's masks do while it completes z_t
    precision, compile   on a GPU: bf16 network, compiled blocks (about twenty seconds once); draws stay exact
    """

    pairs: int = Field(100_000, ge=1)
    steps: int = Field(1024, ge=1)
    noise: NoisePolicy = "posterior"
    start: Literal["perturbed", "prior"] = "perturbed"
    shard: int = Field(4096, ge=1)
    batch_size: int = Field(256, ge=1)
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False

    def writer(self, teacher: MaskedDiffusionLM) -> MaskedDiffusionLM:
        """The teacher as it is to write."""
        return in_precision(teacher, self.precision, compile=self.compile)


class Manifest(Config):
    """Everything that determines the pairs."""

    teacher: str
    mask: str
    schedule: dict[str, float | str]
    generator: str
    noise: NoisePolicy
    steps: int
    start: str
    pairs: int
    shard: int
    seed: int
    data: str
    length: int
    vocab_size: int
    mask_token_id: int
    precision: str = "float32"
    compiled: bool = False

    def digest(self) -> str:
        """As it was before there was a choice of precision, where none was made: pairs made then are still good."""
        values = self.model_dump(mode="json")
        unchosen = {name for name in ("precision", "compiled") if values[name] == type(self).model_fields[name].default}
        return digest({name: value for name, value in values.items() if name not in unchosen})

    @property
    def shards(self) -> int:
        return -(-self.pairs // self.shard)


class Coupling:
    """A finished coupling, read like any corpus: columns `tokens` (x̂), `noised` (z_t), `t`, `seed`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"coupling {str(folder)!r}: no such folder; make one with 'imdm couple'")
        self.manifest = _read_manifest(self.folder)
        have = [i for i in range(self.manifest.shards) if _made_for(shard_path(self.folder, i), self.manifest)]
        if len(have) < self.manifest.shards:
            raise UserError(
                f"coupling {str(folder)!r} is unfinished ({len(have)} of {self.manifest.shards} shards); "
                "run the same 'imdm couple' again to finish it"
            )
        self.length, self.vocab_size = self.manifest.length, self.manifest.vocab_size
        self.mask_id = self.manifest.mask_token_id
        self.fingerprint = self.manifest.digest()
        shards = [self._shard(i) for i in have]
        self._columns = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}

    def _shard(self, index: int) -> dict[str, Tensor]:
        columns = read_tensors(shard_path(self.folder, index), f"coupling {str(self.folder)!r}")
        rows = min(self.manifest.shard, self.manifest.pairs - index * self.manifest.shard)
        if {name: len(c) for name, c in columns.items()} != dict.fromkeys(("tokens", "noised", "t", "seed"), rows):
            raise UserError(
                f"coupling: {shard_path(self.folder, index)} does not hold {rows} pairs; delete and remake it"
            )
        return columns

    def __len__(self) -> int:
        return self.manifest.pairs

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        return {
            name: c[index].long() if name in ("tokens", "noised") else c[index] for name, c in self._columns.items()
        }

    def check(
        self, student: MaskedDiffusionLM, teacher: str, uses_seed: bool, policy: NoisePolicy | None = None
    ) -> None:
        """Refuse a student that these pairs were not made for; `policy`: the noise policy they should have."""
        m, config, where = self.manifest, student.config, f"coupling {str(self.folder)!r}"
        if m.teacher != teacher:
            raise UserError(
                f"{where} was made by teacher {m.teacher}, but training starts from model {teacher}; "
                "make couplings with the model you start from"
            )
        check_fits(self, student)
        if policy is not None and m.noise != policy:
            raise UserError(f"{where} was made under noise policy {m.noise!r}, but {policy!r} is asked for; remake it")
        if m.schedule != config.schedule:
            raise UserError(f"{where} has schedule {m.schedule}, the student has {config.schedule}")
        if uses_seed and m.generator != GENERATOR:
            raise UserError(
                f"{where} was drawn by generator {m.generator!r}, this version draws {GENERATOR!r}; remake it"
            )
        if uses_seed and m.mask not in ("single", student.mask.name):
            raise UserError(
                f"{where} was made under mask {m.mask}, the student's is {student.mask.name}; they must agree"
            )


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"pairs-{index:05d}.safetensors"


def _made_for(path: Path, manifest: Manifest) -> bool:
    """Whether a shard is there and was made under this very manifest."""
    return path.exists() and read_metadata(path, "coupling").get("manifest") == manifest.digest()


def _read_manifest(folder: Path) -> Manifest:
    values = read_json(folder / "manifest.json", f"coupling {str(folder)!r}")
    if "pairs" not in values:  # as of rows of text
        raise UserError(f"coupling {str(folder)!r}: no couplings there; make them with 'imdm couple'")
    return Manifest.parse(values, "manifest")


def couple(
    teacher: MaskedDiffusionLM,
    source: Source | None,
    config: CoupleConfig,
    out: str | Path,
    *,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Make the pairs that are not there yet; process `rank` of `world` takes every world-th shard.

    `source` gives the data that is perturbed; with `start: prior` there is none to give.
    """
    folder = Path(out)
    if (source is None) != (config.start == "prior"):
        raise UserError("couplings that start from data (start: perturbed) need data, those from the prior take none")
    length = teacher.config.length if source is None else source.length
    manifest = Manifest(
        teacher=fingerprint(teacher),
        mask=teacher.mask.name,
        schedule=teacher.config.schedule,
        generator=GENERATOR,
        noise=config.noise,
        steps=config.steps,
        start=config.start,
        pairs=config.pairs,
        shard=config.shard,
        seed=seed,
        data=source.fingerprint if source else "",
        length=length,
        vocab_size=teacher.config.vocab_size,
        mask_token_id=teacher.config.mask_token_id,
        precision=config.precision,
        compiled=config.compile,
    )
    writer = config.writer(teacher)
    if source is not None:
        check_fits(source, teacher)
    if (folder / "manifest.json").exists():
        _refuse_other(folder, manifest)
    elif rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "manifest.json", manifest.model_dump())
    order = Order(seed, len(source)) if source else None
    done = 0
    for index in range(rank, manifest.shards, world):
        first = index * manifest.shard
        pairs = torch.arange(first, min(first + manifest.shard, manifest.pairs))
        if not _made_for(shard_path(folder, index), manifest):
            report = None if on_progress is None else (lambda n, d=done: on_progress(d + n))
            x = source.rows(order(pairs))["tokens"] if source and order else None
            columns = _make(writer, x, pairs, config, seed, report)
            with written_aside(shard_path(folder, index)) as aside:
                tensors = {name: c.contiguous() for name, c in columns.items()}
                save_file(tensors, aside, metadata={"manifest": manifest.digest()})
        done += len(pairs)
        if on_progress is not None:
            on_progress(done)
    return manifest


def _refuse_other(folder: Path, manifest: Manifest) -> None:
    there = _read_manifest(folder).model_dump()
    for field, value in manifest.model_dump().items():
        if there[field] != value:
            raise UserError(
                f"coupling {str(folder)!r} was made with {field} = {there[field]!r}, now asked for {value!r}; "
                "choose another folder or delete that one"
            )


def _make(
    teacher: MaskedDiffusionLM,
    x: Tensor | None,
    pairs: Tensor,
    config: CoupleConfig,
    seed: int,
    on_progress: Callable[[int], None] | None,
) -> dict[str, Tensor]:
    """Pairs (P,): z_t from data rows x (P, L) by the forward process, or all masks; x̂ from z_t by the teacher."""
    device = teacher.device
    keys = fold(as_key(seed), Purpose.PAIR, pairs).to(device)
    if x is not None:
        t = (EARLIEST + (1 - EARLIEST) * uniform(keys, Purpose.TIME)).float()
        noised = teacher.process.corrupt(x.to(device), t, keys).tokens
    else:
        t = torch.ones(len(pairs), device=device)
        noised = torch.full((len(pairs), teacher.config.length), teacher.config.mask_token_id, device=device)
    masks = max(1, int((noised == teacher.config.mask_token_id).sum()))
    report = None if on_progress is None else (lambda written: on_progress(len(pairs) * written // masks))
    made = sample(
        teacher,
        noised,
        keys=keys,
        steps=config.steps,
        t=t,
        policy=config.noise,
        batch_size=config.batch_size,
        on_progress=report,
    )
    columns = {"tokens": made.tokens.int(), "noised": noised.int(), "t": t, "seed": keys}
    return {name: column.cpu() for name, column in columns.items()}
