"""The denoiser x_θ as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from imdm.core.devices import checked_device
from imdm.core.errors import UserError, is_out_of_memory, reason_of, shown
from imdm.core.hub import hub_for
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.face import MaskedLM
from imdm.models.quantized import loading_source
from imdm.models.saving import ATTENTION, check_fit, check_plain, check_saved, save_whole

AS_SAVED = {"dtype", "torch_dtype", "device_map", "low_cpu_mem_usage", "attn_implementation"}
"""Arguments of `from_pretrained` that do not change the saved configuration."""
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # maps of devices that Accelerate makes


class MaskedDiffusionLM(MaskedLM):
    """A masked diffusion language model with any kind of mask and any backbone, as a model of `transformers`. `Network`
    has the computation, `Denoiser` the interface.

    >>> config = MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8)
    >>> model = MaskedDiffusionLM(config)
    >>> model.generate(num=5, steps=1).tokens.shape
    torch.Size([5, 2])
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as in `transformers`, but from safetensors only, and weights that do not fit are refused:
        `transformers` would initialise a missing layer at random. With `output_loading_info` they are reported instead.
        `mask=...` loads an MDM as an IMDM with identical log-probabilities."""
        where, folder = f"model {str(pretrained_model_name_or_path)!r}", Path(str(pretrained_model_name_or_path))
        new_mask, tells = "mask" in kwargs, kwargs.pop("output_loading_info", False)
        as_saved = folder.is_dir() and not kwargs.keys() - AS_SAVED
        kwargs |= {"use_safetensors": True, "output_loading_info": True}
        register()
        _check_arguments(kwargs)
        if folder.is_dir():
            check_plain(folder / (kwargs.get("subfolder") or ""), where)
        try:
            with hub_for(folder):
                source, kwargs = loading_source(cls.config_class, pretrained_model_name_or_path, kwargs)
                loaded: Any = super().from_pretrained(source, *args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or "meta device" in str(error):
                raise
            raise UserError(f"{where}: its weights do not have the shapes of its config.json") from error
        except UserError:
            raise
        except (OSError, SafetensorError, TypeError, KeyError, AttributeError, ValueError, ImportError) as error:
            raise UserError(f"{where} cannot be loaded: {reason_of(error)}") from error
        model, info = loaded
        missing = {name for name in info["missing_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        ignored = {name for name in info["unexpected_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        if not tells:
            check_fit(where, missing, ignored)
        if as_saved:
            check_saved(folder, model.config, where)
        if new_mask and "mask_embedding" in "".join(info["missing_keys"] | info["unexpected_keys"]):
            model.set_policies(order=model.config.order)  # the noise policy was that of the old mask
        model.check_finite(where)
        return (model, info) if tells else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the model as in `transformers`, each file whole or not there, the weights with a digest of
        themselves."""
        if kwargs.get("push_to_hub"):
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        save = super().save_pretrained
        save_whole(lambda place: save(place, *args, **kwargs), Path(save_directory), self.config)


def register() -> None:
    """Let `AutoConfig`, `AutoModel` and `AutoModelForMaskedLM` of `transformers` know our models. Functions of ours
    that load a model or a tokenizer call it; it may be called repeatedly."""
    AutoConfig.register(MaskedDiffusionConfig.model_type, MaskedDiffusionConfig, exist_ok=True)
    for auto in (AutoModel, AutoModelForMaskedLM):
        auto.register(MaskedDiffusionConfig, MaskedDiffusionLM, exist_ok=True)


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments of `from_pretrained` that `transformers` would answer in words of its own, or after a while."""
    for name in ("dtype", "torch_dtype"):
        dtype = arguments.get(name)
        kind = getattr(torch, dtype, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if kind not in (None, "auto") and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise UserError(
                f"{name} = {shown(dtype)}: expected a floating-point type, such as torch.bfloat16, or 'auto'"
            )
    places = arguments.get("device_map")
    for place in places.values() if isinstance(places, dict) else [] if places in (None, *SPREAD) else [places]:
        if place != "disk":
            checked_device(place)
    if arguments.get("attn_implementation") not in (None, *ATTENTION):
        named = shown(arguments["attn_implementation"])
        raise UserError(f"attn_implementation = {named}: {' or '.join(ATTENTION)}; our models have their own attention")
