"""What Gemma 4 computes, defined in float64: a second implementation that exists to check the first.

It shares no code with transformers or with the envoys, and reads nothing but weights and a config.

    ops        the operations, one function per formal definition
    block      one block, from the stream that enters it
    vision, audio, unified
               the towers of a wrapper, or what it has in their place
    media      what they make of images, frames and sounds, in the place of tokens
    forward    the whole model, from token ids to every value by its standard name
    names      which values those are
    drawing    a block's data flow as an SVG

`gemloupe.verify` holds a model to them: `looks` runs the reference beside the model, `compare` says how far a
value is off and how far it may be, `report` what was found.
"""

from __future__ import annotations

from .block import block
from .cache import Cache
from .forward import entrance, forward, head, parts
from .media import Media, runs_of_media
from .names import names
from .sight import Sight, sight
from .towers import Towers, towers
from .weights import Weights, text_names

__all__ = [
    "Cache",
    "Media",
    "Sight",
    "Towers",
    "Weights",
    "block",
    "entrance",
    "forward",
    "head",
    "names",
    "parts",
    "runs_of_media",
    "sight",
    "text_names",
    "towers",
]
