"""One loop over objectives, its checkpoints and its averaged weights."""

from imdm.training.config import TrainConfig
from imdm.training.ema import EMA
from imdm.training.trainer import Progress, Trainer

__all__ = ["EMA", "Progress", "TrainConfig", "Trainer"]
