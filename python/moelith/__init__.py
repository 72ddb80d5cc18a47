"""Mixture-of-experts layers for PyTorch: one schedule, forward and backward, deterministic.

    moelith.MoE               the layer as an nn.Module (moelith.module)
    moelith.functional        the layer as a function of tensors
    moelith.convert           weights from and to Hugging Face transformers
    moelith.LayerConfig       what a layer computes; with Activation, Router, SharedExpert
    moelith.PlanOptions       how it is run; with Group for expert parallelism

Names are loaded at first use, so that `import moelith` alone does not import PyTorch.
"""

import importlib

_HOME = {
    "Activation": "config",
    "Router": "config",
    "SharedExpert": "config",
    "LayerConfig": "config",
    "PlanOptions": "config",
    "Group": "runtime",
    "MoE": "module",
    "MoEOutput": "functional",
}
_MODULES = ("config", "convert", "functional", "module", "runtime")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name):
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("moelith")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
