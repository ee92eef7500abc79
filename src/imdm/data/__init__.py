"""Training and evaluation data: enumerated languages, token files, text, couplings.

Names are imported when first used: a missing corpus is refused before torch is imported.
"""

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
    from imdm.data.corpora import Corpus
    from imdm.data.coupling import CoupleConfig, Coupling, Manifest, couple
    from imdm.data.packing import PrepareConfig, prepare, prepare_part
    from imdm.data.prepared import PreparedSource
    from imdm.data.source import (
        Data,
        LanguageData,
        LanguageSource,
        Order,
        Source,
        TokenData,
        TokenSource,
        check_fits,
    )
    from imdm.data.synthetic import Language, aligned, languages, markov, two_topic
    from imdm.data.text import DataConfig, PreparedData, TextData, prepared_for
else:
    __getattr__ = later(
        __name__,
        {
            "imdm.data.corpora": ("Corpus",),
            "imdm.data.coupling": ("CoupleConfig", "Coupling", "Manifest", "couple"),
            "imdm.data.packing": ("PrepareConfig", "prepare", "prepare_part"),
            "imdm.data.prepared": ("PreparedSource",),
            "imdm.data.source": (
                "Data",
                "LanguageData",
                "LanguageSource",
                "Order",
                "Source",
                "TokenData",
                "TokenSource",
                "check_fits",
            ),
            "imdm.data.synthetic": ("Language", "aligned", "languages", "markov", "two_topic"),
            "imdm.data.text": ("DataConfig", "PreparedData", "TextData", "prepared_for"),
        },
    )

__all__ = [
    "Corpus",
    "CoupleConfig",
    "Coupling",
    "Data",
    "DataConfig",
    "Language",
    "LanguageData",
    "LanguageSource",
    "Manifest",
    "Order",
    "PrepareConfig",
    "PreparedData",
    "PreparedSource",
    "Source",
    "TextData",
    "TokenData",
    "TokenSource",
    "aligned",
    "check_fits",
    "couple",
    "languages",
    "markov",
    "prepare",
    "prepare_part",
    "prepared_for",
    "two_topic",
]
