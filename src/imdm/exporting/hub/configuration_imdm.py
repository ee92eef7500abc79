"""The configuration of a masked diffusion language model, for plain `transformers`."""

from __future__ import annotations

from typing import Any

from imdm.models.configuration import MaskedDiffusionConfig as Settings


class MaskedDiffusionConfig(Settings):
    """As in `imdm`, and it keeps where the code is, so that what is saved again has it too."""

    def __init__(self, *args: Any, auto_map: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if auto_map is not None:
            self.auto_map = auto_map
