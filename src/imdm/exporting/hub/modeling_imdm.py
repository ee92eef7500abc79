"""A masked diffusion language model for plain `transformers`: logits of all positions, and text in a few steps.

model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
model(**tokenizer("…", return_tensors="pt")).logits
model.generate(num=4, steps=8)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from imdm.core.errors import check_whole
from imdm.exporting.hub.configuration_imdm import MaskedDiffusionConfig
from imdm.models.face import MaskedLM


class MaskedDiffusionLM(MaskedLM):
    """Tokens, and the noise of masked ones → embeddings → transformer → logits of the tokens that were masked."""

    config_class = MaskedDiffusionConfig

    def generate(  # type: ignore[override]  # tokens alone, as models of `transformers` return them
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        length: int | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **how: Any,
    ) -> Tensor:
        """Write token ids (B·num, length) in at most `steps` network evaluations.

        input_ids       (B, L): a canvas whose holes are `mask_token_id`, which are filled; without holes, a prompt,
                        which is continued. Without it: `num` sequences from nothing
        attention_mask  (B, L): 0 at padding beside prompts, which is left out
        length          of the result; the model's own unless given. max_new_tokens: so many after the longest prompt
        seed            the same seed, the same text; None: drawn from torch's generator
        num             how often each row is completed, one row after another
        how             steps, temperature, top_p; noise (`posterior` or `keep`) and order (`random` or `spread`), the
                        configuration's unless given; batch_size, the most sequences in one evaluation

        A model of whole texts begins and ends them itself: after the end comes padding.
        """
        if max_new_tokens is not None and length is None:
            check_whole("max_new_tokens", max_new_tokens, 1, self.config.length)
            length = max_new_tokens + (0 if input_ids is None else input_ids.shape[-1])
        seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        return super().generate(input_ids, attention_mask, length=length, seed=seed, **how).tokens
