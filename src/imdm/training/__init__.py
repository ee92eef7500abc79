"""The training loop for all objectives and their networks, its checkpoints and averaged weights."""

from imdm.training.config import TrainConfig
from imdm.training.ema import EMA
from imdm.training.network import TrainedNetwork
from imdm.training.trainer import Progress, Trainer

__all__ = ["EMA", "Progress", "TrainConfig", "TrainedNetwork", "Trainer"]
