"""DFlash on Transformers in about a page: the oracle of the engine's tests, and the place to read the algorithm."""

from sglang_dflash.reference.drafter import Context, Drafter, load_drafter
from sglang_dflash.reference.generate import SpecOutput, spec_generate

__all__ = ["Context", "Drafter", "SpecOutput", "load_drafter", "spec_generate"]
