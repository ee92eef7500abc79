"""Jobs of an engine: what to write, how it goes on, and whom to tell."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imdm.core.errors import UserError, check_number, check_seed, check_whole
from imdm.diffusion.process import NoisePolicy
from imdm.sampling.options import RevealOrder, Sampling
from imdm.serving.settings import Settings

if TYPE_CHECKING:
    from imdm.models.network import Network


class Busy(UserError):  # noqa: N818
    """The queue is full. after: seconds after which to retry."""

    def __init__(self, sentence: str, after: int) -> None:
        super().__init__(sentence)
        self.after = after


class TooLong(UserError):  # noqa: N818
    """A request exceeded its time limit; its work was dropped."""


class Stopped(UserError):  # noqa: N818
    """The engine is stopping or out of memory; the request was not completed."""


class Failed(UserError):  # noqa: N818
    """An internal error, which is in the log."""


@dataclass(frozen=True)
class Job:
    """One sequence to write.

    model          by its name in the engine
    ids            its row, with the model's begin and end tokens; None where a token is to be generated
    steps, temperature, top_p    as in `Sampling`; noise, order: too, the model's own unless given
    seed, number   its randomness is that of text `number` of `Writer.write(seed=seed)`
    draws_seed     another seed for the draws of tokens
    noise_seed     another seed for the masks' noise
    noise_between  two seeds and s in [0, 1]: the masks' noise is on the path from the first's to the second's
    frames         whether to send a frame after every step that reveals something; else only the last
    """

    model: str
    ids: Sequence[int | None]
    steps: int = 8
    seed: int = 0
    number: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    noise: NoisePolicy | None = None
    order: RevealOrder | None = None
    draws_seed: int | None = None
    noise_seed: int | None = None
    noise_between: tuple[int, int, float] | None = None
    frames: bool = False

    def how(self, model: Network) -> Sampling:
        """The job's sampling options; where `noise` or `order` is None, the model's own."""
        policies = model.policies(self.noise, self.order)
        return Sampling(self.steps, temperature=self.temperature, top_p=self.top_p, **policies)

    def checked(self, model: Network, settings: Settings) -> Sampling:
        """The job's sampling options, once it is something that this model can write, and within the limits."""
        how = self.how(model)
        check_whole("steps", self.steps, 1, settings.steps)
        for name in ("seed", "draws_seed", "noise_seed"):
            if getattr(self, name) is not None:
                check_seed(getattr(self, name), name)
        check_whole("number", self.number, 0, (1 << 31) - 1)
        if self.noise_between is not None:
            first, second, s = self.noise_between
            check_seed(first, "noise_between")
            check_seed(second, "noise_between")
            check_number("noise_between", s)
            if not 0 <= s <= 1:
                raise UserError(f"noise_between = {s}: a place between two noises is in [0, 1]")
        if not 1 <= len(self.ids) <= model.length:
            raise UserError(f"the row has {len(self.ids)} tokens, the model takes 1 to {model.length}")
        tokens = [token for token in self.ids if token is not None]
        if not all(type(token) is int for token in tokens) or (
            tokens and not 0 <= min(tokens) <= max(tokens) < model.vocab_size
        ):
            for token in tokens:
                check_whole("ids", token, 0, model.vocab_size - 1)
        return how


@dataclass(frozen=True)
class Frame:
    """A sequence after one of its steps.

    step         how many steps are done, 1 … steps; a step that reveals nothing has no frame; 0 where nothing was to be
                 written
    ids          None where still masked
    revealed_at  the step that revealed each position, 0 the first; −1 where given, or, as the end, drawn first, or
                 still masked
    probability  the model's probability of each token when it was drawn; 1 where no step revealed it, 0 where still
                 masked
    done         whether this is the last
    evaluations  of the network so far, for this sequence
    seconds since the job was started
    """

    step: int
    ids: list[int | None]
    revealed_at: list[int]
    probability: list[float]
    done: bool
    evaluations: int
    seconds: float


@dataclass(eq=False)
class Ticket:
    """A job in progress: `hear` is called in its event loop with each frame, or with an error."""

    job: Job
    how: Sampling
    loop: AbstractEventLoop
    hear: Callable[[Frame | UserError], None]
    came: float
    began: float = 0.0
    dropped: bool = False


def ends(news: Frame | UserError) -> bool:
    """Whether a job is told nothing after this."""
    return isinstance(news, UserError) or news.done


def unfinished_error() -> Stopped:
    """What jobs are told that the engine did not finish before it stopped."""
    return Stopped("the service stopped before the text was finished; try again when it has restarted")


def tell(news: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
    """Hand frames or errors to the jobs' event loops, from another thread: one call for each loop, as a call wakes it,
    and it then competes with this thread for the interpreter."""
    for loop in {ticket.loop for ticket, _ in news}:
        here = [(ticket, one) for ticket, one in news if ticket.loop is loop]
        try:
            loop.call_soon_threadsafe(_hear, here)
        except RuntimeError:  # the event loop is closed
            for ticket, _ in here:
                ticket.dropped = True


def _hear(news: Sequence[tuple[Ticket, Frame | UserError]]) -> None:
    for ticket, one in news:
        ticket.hear(one)
