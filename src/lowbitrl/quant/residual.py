"""The residual second pass, where the modules that wear it look for it; formats/residual.py defines it."""

from lowbitrl.formats.residual import channel_count, channel_scores, compensate, select_channels

__all__ = ["channel_count", "channel_scores", "compensate", "select_channels"]
