"""The configuration of a masked diffusion language model, for plain `transformers`."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class MaskedDiffusionConfig(PreTrainedConfig):
    """The settings of a model.

    vocab_size, mask_token_id   the mask token is one of the vocabulary, and never predicted
    length          the longest sequence
    mask            what masked positions carry: {"kind": "single"}, {"kind": "finite", "count": …} or
                    {"kind": "infinite", "law": "uniform" or "normal", "dim": …, "scale": …}
    mixture         whether a latent shared by all positions is appended as one more token
    schedule        {"kind": "log-linear" or "cosine", "floor": …}
    width, blocks, heads, dropout, softcap    of the transformer
    backbone        {"kind": "hf", "config": …, "shift": …}: a model of `transformers` instead of our transformer;
                    "shift": each position is predicted by the row before it
    bos_token_id, eos_token_id, pad_token_id  of a model that writes whole texts; else None
    lengths         of such a model: the share of texts of 0, 1, 2 … tokens, where the end is drawn first; else None
    noise, order    "posterior" or "keep", "random" or "spread": what `generate` does unless told; None: the first
    """

    model_type = "imdm"
    attribute_map = {"max_position_embeddings": "length"}  # noqa: RUF012  (transformers' own convention)

    def __init__(
        self,
        vocab_size: int = 50258,
        mask_token_id: int | None = None,
        length: int = 1024,
        width: int = 768,
        blocks: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        softcap: float | None = None,
        mask: dict[str, Any] | None = None,
        mixture: bool = False,
        schedule: dict[str, Any] | None = None,
        backbone: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        lengths: list[float] | None = None,
        noise: str | None = None,
        order: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.length = vocab_size, length
        self.mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        self.width, self.blocks, self.heads, self.condition = width, blocks, heads, 0
        self.dropout, self.softcap = dropout, softcap
        self.mask: dict[str, Any] = {"kind": "single"} if mask is None else mask
        self.mixture = mixture
        self.schedule: dict[str, Any] = {"kind": "log-linear", "floor": 1e-3} if schedule is None else schedule
        if backbone is not None:
            self.backbone = backbone
        self.tie_word_embeddings = tie_word_embeddings
        kwargs.pop("condition", None)
        super().__init__(**kwargs)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        self.lengths, self.noise, self.order = lengths, noise, order

    def network(self) -> Any:
        """The configuration of the model that replaces our transformer, None without one."""
        backbone = getattr(self, "backbone", None)
        if backbone is None:
            return None
        fields = dict(backbone["config"])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)

    @property
    def hidden_size(self) -> int:
        return self.width if (network := self.network()) is None else network.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.blocks if (network := self.network()) is None else network.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        return self.heads if (network := self.network()) is None else network.num_attention_heads
