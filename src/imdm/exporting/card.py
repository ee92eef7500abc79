"""The model card of a folder for plain `transformers`, with example calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from imdm import __version__
from imdm.data.tokenizers import special_ids

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

HEAD = """---
library_name: transformers
pipeline_tag: fill-mask
tags: [masked-diffusion, custom_code]
---
"""


def hub_card(model: MaskedDiffusionLM, name: str, tokenizer: Any = None) -> str:
    config = model.config
    count = sum(parameter.numel() for parameter in model.parameters())
    load = "load_model" if tokenizer is None else "load"
    whole = "; it writes whole texts and ends them itself" if config.ending is not None else ""
    return f"""{HEAD}
# {name}

A masked diffusion language model of {count / 1e6:.1f}M parameters: it writes all positions in parallel, in a few
network evaluations.

- {model.backbone.about}; mask {model.mask.name}; sequences of up to {config.length} tokens{whole}
- vocabulary of {config.vocab_size:,} ids; the mask is {config.mask_token_id}

It needs `torch` and `transformers` 5.17 or newer. The code beside the weights is run: it is that of `imdm`
{__version__}, but for its imports.

```python
{_calls(tokenizer)}
```

`model.generate` takes `steps`, `temperature`, `top_p`, `noise` ("posterior" or "keep") and `seed`, with which it writes
what `imdm` does. A row with holes,
token {config.mask_token_id}, is filled in. `model(input_ids=…, attention_mask=…, labels=…)` gives `loss` and `logits`.
With `imdm` installed, `imdm.{load}("{name}")` loads the same folder.
"""


def _calls(tokenizer: Any) -> str:
    load = 'model = AutoModelForMaskedLM.from_pretrained("PATH OR HUB ID", trust_remote_code=True)'
    if tokenizer is None:
        lines = ["from transformers import AutoModelForMaskedLM", "", load, "model.generate(num=4, steps=8)  # ids"]
        return "\n".join(lines)
    begin = special_ids(tokenizer).begin
    lines = ["import torch", "from transformers import AutoModelForMaskedLM, AutoTokenizer", "", load]
    lines += ['tokenizer = AutoTokenizer.from_pretrained("PATH OR HUB ID", trust_remote_code=True)']
    lines += ['prompt = tokenizer("It was", add_special_tokens=False)["input_ids"]']
    lines += [f"tokens = model.generate(torch.tensor([[{begin}, *prompt]]), num=4, steps=8)  # {begin} begins a text"]
    lines += ["print(tokenizer.batch_decode(tokens, skip_special_tokens=True))"]
    return "\n".join(lines)
