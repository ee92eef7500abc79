"""Our models in lm-eval, EleutherAI's evaluation harness for language models: `pip install 'imdm[lm-eval]'`.

Importing this registers the model `imdm` there; `imdm lm-eval` is the same as a command.

    import lm_eval, imdm.lm_eval
    lm = imdm.lm_eval.DiffusionLM("models/mine", n=128, steps=32)
    lm_eval.simple_evaluate(model=lm, tasks=["blimp"])
    lm.stderr       # the mean Monte-Carlo standard error of a log-likelihood, in nats
"""

from imdm.lm_eval.model import DiffusionLM
from imdm.lm_eval.tasks import Figure, Tasks, figures

__all__ = ["DiffusionLM", "Figure", "Tasks", "figures"]
