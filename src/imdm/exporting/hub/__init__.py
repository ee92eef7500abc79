"""What a model needs to run without `imdm`: two files that import torch and transformers alone, copied beside its
weights by `imdm export --layout transformers`. Tests compare them with our own classes."""
