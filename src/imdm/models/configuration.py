"""The configuration of a masked diffusion language model, in the shape `transformers` expects."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from imdm.models.backbones import backbones
from imdm.models.shape import LARGEST_VOCABULARY, PRESETS, Shape

__all__ = ["LARGEST_VOCABULARY", "PRESETS", "MaskedDiffusionConfig"]


class MaskedDiffusionConfig(Shape, PreTrainedConfig):
    """What a model is made of.

    vocab_size      V, the mask token included
    mask_token_id   the mask's id (the last id unless given: V − 1)
    length          the longest sequence
    mask            `single`, `finite-6144`, `infinite-uniform-768-1.0`, or their settings
    mixture         one extra token, appended to the sequence, shows the model a latent λ ~ U(0, 1) that all positions
                    share (Di4C's mixture model)
    schedule        `log-linear`, or its settings
    backbone        what turns embeddings into hidden states: `dit` unless given, or settings with `kind`
    width, dropout  of any backbone
    blocks, heads, softcap    of `dit`; `preset` fills width, blocks, heads and condition
    condition       of `dit`: width of adaLN's conditioning; 0: folded into the other weights (`fold_conditioning`)
    bos_token_id, eos_token_id, pad_token_id   where rows are whole texts (`Ending`): what follows the end token is
                    padding. None: rows are cut from a stream
    lengths         of whole texts: the share of texts of 0, 1, 2 … tokens, begin and end counted. Where it is known,
                    the end of a text is drawn first, then the text before it. None: the network draws the end
    causal          each position attends to those before it only: an autoregressive language model, which can judge
                    samples of others (objective `autoregressive`)

    The common names of `transformers` work too: hidden_size, num_hidden_layers, num_attention_heads,
    max_position_embeddings; for backbone `hf` they are those of its own configuration.
    """

    model_type = "imdm"
    attribute_map: ClassVar[dict[str, str]] = {"max_position_embeddings": "length"}
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    lengths: list[float] | None = None

    __init__ = Shape.__init__  # else `transformers` would generate one

    def _of_backbone(self, name: str, own: str) -> Any:
        """A size by its name in `transformers`: from the backbone's configuration for `hf`, else our own."""
        if not backbones[self.backbone["kind"]].whole:
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
