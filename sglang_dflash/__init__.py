"""DFlash block-diffusion speculative decoding for stock SGLang (arXiv 2602.06036)."""

__version__ = "0.1.0"
