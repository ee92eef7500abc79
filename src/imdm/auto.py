"""Our models under the Auto classes of `transformers`: AutoConfig, AutoModel, AutoModelForMaskedLM.

`import imdm` must not wait for torch. So the classes are registered when both they and the Auto classes are loaded,
whichever comes last: importing the Auto classes after `import imdm` imports ours too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

CONFIGS, MODELS = "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"
OURS = "imdm.models.denoiser"


def watch() -> None:
    """Register what is imported now, and the rest when it is."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    if CONFIGS in sys.modules:
        _registered()


def register() -> None:
    """Register our classes with the Auto classes that are imported by now; may be called repeatedly."""
    from imdm.models.configuration import MaskedDiffusionConfig
    from imdm.models.denoiser import MaskedDiffusionLM

    if (configs := _loaded(CONFIGS)) is not None:
        configs.AutoConfig.register(MaskedDiffusionConfig.model_type, MaskedDiffusionConfig, exist_ok=True)
    if (models := _loaded(MODELS)) is not None:
        for auto in (models.AutoModel, models.AutoModelForMaskedLM):
            auto.register(MaskedDiffusionConfig, MaskedDiffusionLM, exist_ok=True)


def _loaded(name: str) -> Any:
    """A module that has run to its end, else None; the end of MODELS defines its last classes."""
    module = sys.modules.get(name)
    last = "AutoConfig" if name == CONFIGS else "AutoModelForMaskedLM"
    return module if hasattr(module, last) else None


def _registered() -> None:
    """Register if our models are imported; while they are being imported, they do it at their end."""
    if OURS in sys.modules:
        if hasattr(sys.modules[OURS], "around"):  # its last function
            register()
    else:
        import_module(OURS)


class _Watch:
    """An import hook that is called when the Auto classes have been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in (CONFIGS, MODELS):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then(spec.loader, _registered)  # type: ignore[method-assign, assignment]
        return spec


def _then(loader: Loader, done: Callable[[], None]) -> Callable[[ModuleType], None]:
    run = loader.exec_module

    def both(module: ModuleType) -> None:
        run(module)
        done()

    return both
