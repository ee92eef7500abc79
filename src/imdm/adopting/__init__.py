"""Conversion of published models: masked diffusion models, and any language model of `transformers`."""
