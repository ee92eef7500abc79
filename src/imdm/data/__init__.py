"""What is trained on: enumerated languages, token files, couplings."""

from imdm.data.coupling import CoupleConfig, Coupling, Manifest, couple
from imdm.data.source import (
    DataConfig,
    LanguageData,
    LanguageSource,
    Order,
    Source,
    TokenData,
    TokenSource,
    check_fits,
)
from imdm.data.synthetic import Language, aligned, languages, markov, two_topic

__all__ = [
    "CoupleConfig",
    "Coupling",
    "DataConfig",
    "Language",
    "LanguageData",
    "LanguageSource",
    "Manifest",
    "Order",
    "Source",
    "TokenData",
    "TokenSource",
    "aligned",
    "check_fits",
    "couple",
    "languages",
    "markov",
    "two_topic",
]
