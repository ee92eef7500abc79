"""The configuration of a masked diffusion language model, in the shape `transformers` expects."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from imdm.diffusion.process import NoisePolicy
from imdm.models.backbones import backbones
from imdm.models.shape import Shape
from imdm.sampling.options import RevealOrder


class MaskedDiffusionConfig(Shape, PreTrainedConfig):
    """What a model is made of: the settings of `imdm.models.Shape`, as a configuration of `transformers`.

    The common names of `transformers` work too: hidden_size, num_hidden_layers, num_attention_heads,
    max_position_embeddings; for backbone `hf` they are those of its own configuration.
    """

    model_type = "imdm"
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "length"}
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    lengths: list[float] | None = None
    noise: NoisePolicy | None = None
    order: RevealOrder | None = None

    __init__ = Shape.__init__  # else `transformers` would generate one

    def changed(self, **changes: Any) -> Self:
        return type(self).from_dict(self.to_dict() | changes)

    def _of_backbone(self, name: str, own: str) -> Any:
        """A size by its name in `transformers`: from the backbone's configuration for `hf`, else our own."""
        if not backbones[self.backbone["kind"]].owns_embedding:
            return getattr(self, own)
        from transformers import AutoConfig

        fields = dict(self.backbone["config"])
        return getattr(AutoConfig.for_model(fields.pop("model_type"), **fields), name)

    @property
    def hidden_size(self) -> int:
        return self._of_backbone("hidden_size", "width")

    @hidden_size.setter
    def hidden_size(self, value: int) -> None:
        self.width = value

    @property
    def num_hidden_layers(self) -> int:
        return self._of_backbone("num_hidden_layers", "blocks")

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int) -> None:
        self.blocks = value

    @property
    def num_attention_heads(self) -> int:
        return self._of_backbone("num_attention_heads", "heads")

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        self.heads = value
