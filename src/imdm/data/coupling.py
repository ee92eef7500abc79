"""Couplings: (z_t, t, seed) → x̂ pairs made by a teacher, stored as safetensors shards with a manifest.

A folder holds `manifest.json` with all settings that determine the pairs, and `pairs-00000.safetensors`, … Pair i
depends on the manifest and on i alone, so a stopped run resumes with the next missing shard, and several processes can
share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from imdm.core.config import Config
from imdm.core.errors import MOST_STEPS, UserError, check_is, check_seed, check_whole, shown
from imdm.core.files import (
    as_path,
    check_tensors,
    read_metadata,
    read_recorded,
    read_tensors,
    working_in,
    write_recorded,
    write_tensors,
)
from imdm.core.memory import check_memory
from imdm.data.source import Order, Source, check_fits
from imdm.diffusion.masks import parse_mask
from imdm.diffusion.process import NoisePolicy
from imdm.diffusion.randomness import GENERATOR, Purpose, as_key, fold, uniform
from imdm.diffusion.schedule import EARLIEST, parse_schedule
from imdm.models import Network, check_tokens
from imdm.models.fast import in_precision
from imdm.models.identity import fingerprint
from imdm.sampling import Sampling, sample

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM
    from imdm.models.shape import Shape


class CoupleConfig(Config):
    """How couplings are made.

    start   `perturbed`: data corrupted to t ~ U(10⁻³, 1); `prior`: everything masked, t = 1
    noise   the noise policy of the teacher's masks while it completes z_t
    precision, compile   on a GPU: bf16 network, compiled blocks (about twenty seconds once); draws stay exact
    """

    pairs: int = Field(100_000, ge=1)
    steps: int = Field(1024, ge=1, le=MOST_STEPS)
    noise: NoisePolicy = "posterior"
    start: Literal["perturbed", "prior"] = "perturbed"
    shard: int = Field(4096, ge=1)
    batch_size: int = Field(256, ge=1)
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False

    def writer(self, teacher: MaskedDiffusionLM) -> MaskedDiffusionLM:
        """The teacher prepared for sampling."""
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

    @property
    def shards(self) -> int:
        return -(-self.pairs // self.shard)


class Coupling:
    """A finished coupling, read like any corpus: columns `tokens` (x̂), `noised` (z_t), `t`, `seed`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder, "coupling")
        if not self.folder.is_dir():
            raise UserError(f"coupling {str(folder)!r}: no such folder; make one with 'imdm couple'")
        self.manifest = _read_manifest(self.folder)
        have = [i for i in range(self.manifest.shards) if shard_path(self.folder, i).is_file()]
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
        m, where = self.manifest, f"coupling: {shard_path(self.folder, index)}"
        columns = read_tensors(shard_path(self.folder, index), f"coupling {str(self.folder)!r}")
        if not _belongs(self.folder, index, m):
            raise UserError(f"{where} is not the shard of these pairs that its name says; delete and remake it")
        rows = min(m.shard, m.pairs - index * m.shard)
        shapes = {"tokens": (rows, m.length), "noised": (rows, m.length), "t": (rows,), "seed": (rows,)}
        if {name: tuple(c.shape) for name, c in columns.items()} != shapes:
            raise UserError(f"{where} does not hold {rows} pairs of {m.length} tokens; delete and remake it")
        if any(columns[name].is_floating_point() for name in ("tokens", "noised", "seed")):
            raise UserError(f"{where} holds fractions where ids and seeds belong; delete and remake it")
        for name in ("tokens", "noised"):
            check_tokens(columns[name], m.vocab_size, f"{where}, {name}")
        if bool((columns["tokens"] == m.mask_token_id).any()):
            raise UserError(f"{where} has masks in the teacher's samples; delete and remake it")
        if not bool(((columns["t"] > 0) & (columns["t"] <= 1)).all()):
            raise UserError(f"{where} has times outside (0, 1]; delete and remake it")
        return columns

    def __len__(self) -> int:
        return self.manifest.pairs

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        return {
            name: c[index].long() if name in ("tokens", "noised") else c[index] for name, c in self._columns.items()
        }

    def check(self, student: Shape, teacher: str, uses_seed: bool, policy: NoisePolicy | None = None) -> None:
        """Refuse a student that these pairs were not made for; `policy`: the noise policy they should have."""
        m, where, mask = self.manifest, f"coupling {str(self.folder)!r}", parse_mask(student.mask).name
        if m.teacher != teacher:
            raise UserError(
                f"{where} was made by teacher {m.teacher}, but training starts from model {teacher}; "
                "make couplings with the model you start from"
            )
        check_fits(self, student)
        if policy is not None and m.noise != policy:
            raise UserError(f"{where} was made under noise policy {m.noise!r}, not under {policy!r}; remake it")
        if parse_schedule(m.schedule) != parse_schedule(student.schedule):
            raise UserError(f"{where} has schedule {m.schedule}, the student has {student.schedule}")
        if uses_seed and m.generator != GENERATOR:
            raise UserError(
                f"{where} was drawn by generator {m.generator!r}, this version has {GENERATOR!r}; remake it"
            )
        if uses_seed and m.mask not in ("single", mask):
            raise UserError(f"{where} was made under mask {m.mask}, the student's is {mask}; they must agree")


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"pairs-{index:05d}.safetensors"


def _shard_metadata(manifest: Manifest, index: int) -> dict[str, str]:
    """Metadata of a shard: the manifest and index it belongs to."""
    return {"manifest": manifest.digest(), "shard": str(index)}


def _belongs(folder: Path, index: int, manifest: Manifest) -> bool:
    """Whether a shard was made under this manifest, with this index."""
    metadata = read_metadata(shard_path(folder, index), "coupling")
    return _shard_metadata(manifest, index).items() <= metadata.items()


def _has_shard(folder: Path, index: int, manifest: Manifest) -> bool:
    """Whether a shard exists, is whole and belongs here; any other is made again."""
    try:
        check_tensors(shard_path(folder, index), "coupling")
        return _belongs(folder, index, manifest)
    except UserError:
        return False


def _read_manifest(folder: Path) -> Manifest:
    values = read_recorded(folder / "manifest.json", f"coupling {str(folder)!r}")
    if "pairs" not in values:  # such as a manifest of prepared text
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
    """Make the missing pairs; process `rank` of `world` makes every world-th shard.

    `source` is the data to perturb; None with `start: prior`.
    """
    folder = as_path(out, "out")
    _check_can_couple(teacher, source, config)
    check_seed(seed)
    check_whole("world", world)
    check_whole("rank", rank, 0, world - 1)
    length = teacher.config.length if source is None else source.length
    check_memory("pairs", config.pairs, 8 * length + 12, on=folder)
    manifest = _manifest(teacher, source, config, length, seed)
    writer = config.writer(teacher)
    if source is not None:
        check_fits(source, teacher.config)
    if (folder / "manifest.json").exists():
        _refuse_other(folder, manifest)
    order = Order(seed, len(source)) if source else None
    done = 0
    with working_in(folder) if rank == 0 else nullcontext():
        if rank == 0 and not (folder / "manifest.json").exists():
            write_recorded(folder / "manifest.json", manifest.model_dump())
        # Whole shards are all that a stopped run leaves: one that belongs to this manifest is kept, any other made
        # again. Pair i draws from its own key and reads data row order(i), so it does not matter who makes it, or when.
        for index in range(rank, manifest.shards, world):
            first = index * manifest.shard
            pairs = torch.arange(first, min(first + manifest.shard, manifest.pairs))
            if not _has_shard(folder, index, manifest):
                report = None if on_progress is None else (lambda n, d=done: on_progress(d + n))
                x = source.rows(order(pairs))["tokens"] if source and order else None
                columns = _make_pairs(writer, x, pairs, config, seed, report)
                tensors = {name: c.contiguous() for name, c in columns.items()}
                write_tensors(shard_path(folder, index), tensors, _shard_metadata(manifest, index))
            done += len(pairs)
            if on_progress is not None:
                on_progress(done)
    return manifest


def _check_can_couple(teacher: MaskedDiffusionLM, source: Source | None, config: CoupleConfig) -> None:
    """Refuse what no pairs can be made from."""
    check_is("teacher", teacher, Network, "a model")
    check_is("config", config, CoupleConfig, "a CoupleConfig")
    if source is not None and not hasattr(source, "rows"):
        raise UserError(f"source = {shown(source)}: expected rows of data")
    if (source is None) != (config.start == "prior"):
        raise UserError("couplings that start from data (start: perturbed) need data, those from the prior take none")
    if teacher.config.causal:
        raise UserError("the teacher is autoregressive: it completes no z_t in steps; pairs need a diffusion model")


def _manifest(
    teacher: MaskedDiffusionLM, source: Source | None, config: CoupleConfig, length: int, seed: int
) -> Manifest:
    """The manifest of pairs to make: all settings that they follow from."""
    return Manifest(
        teacher=fingerprint(teacher),
        mask=teacher.mask.name,
        schedule=parse_schedule(teacher.config.schedule).hashed(),
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


def _refuse_other(folder: Path, manifest: Manifest) -> None:
    there = _read_manifest(folder).model_dump()
    for field, value in manifest.model_dump().items():
        if there[field] != value:
            raise UserError(
                f"coupling {str(folder)!r} was made with {field} = {there[field]!r}, not {value!r}; "
                "choose another folder or delete that one"
            )


def _make_pairs(
    teacher: MaskedDiffusionLM,
    x: Tensor | None,
    pairs: Tensor,
    config: CoupleConfig,
    seed: int,
    on_progress: Callable[[int], None] | None,
) -> dict[str, Tensor]:
    """Pairs (P,): z_t from data rows x (P, L) by the forward process, or all masks; x̂ from z_t by the teacher."""
    device = teacher.device
    # One key a pair gives its time, its corruption and all draws of the teacher. It is stored as the pair's seed: from
    # it a student draws again the noise of its masks under which the teacher completed z_t.
    keys = fold(as_key(seed), Purpose.PAIR, pairs).to(device)
    if x is not None:
        t = (EARLIEST + (1 - EARLIEST) * uniform(keys, Purpose.TIME)).float()
        noised = teacher.process.corrupt(x.to(device), t, keys).tokens
    else:
        t = torch.ones(len(pairs), device=device)
        noised = torch.full((len(pairs), teacher.config.length), teacher.config.mask_token_id, device=device)
    # The sampler reports masks written, and `couple` progress in pairs.
    masks = max(1, int((noised == teacher.config.mask_token_id).sum()))
    report = None if on_progress is None else (lambda written: on_progress(len(pairs) * written // masks))
    generation = sample(
        teacher,
        noised,
        keys=keys,
        how=Sampling(config.steps, config.noise),
        t=t,
        batch_size=config.batch_size,
        on_progress=report,
    )
    columns = {"tokens": generation.tokens.int(), "noised": noised.int(), "t": t, "seed": keys}
    return {name: column.cpu() for name, column in columns.items()}
