"""What is trained on: enumerated languages, token files, couplings."""

from imdm.data.coupling import CoupleConfig, Coupling, Manifest, couple
from imdm.data.source import DataConfig, LanguageData, LanguageSource, Order, Source, TokenData, TokenSource
from imdm.data.synthetic import Language, aligned, languages

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
    "couple",
    "languages",
]
