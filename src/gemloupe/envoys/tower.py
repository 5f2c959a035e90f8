"""What the hosts of images and sound share: their rows are images, frames or sounds, not texts.

A tower runs once a forward on all images of a batch, padded to one length, and once more on video frames
if there are any; `MediaRows` says which of its rows are an invoke's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..errors import NeverRan
from ..generation import uses_cache
from ..media import GIVEN_BY
from .base import StandardEnvoy

if TYPE_CHECKING:
    from nnsight.intervention.interleaver import Mediator

    from ..plan import TowerBlockPlan
    from ..served import Served

__all__ = ["IMAGES", "SOUNDS", "PartOfBlockOfTower", "PartOfTower"]

IMAGES: Final = {"batch": "images", "seq": "patches", "hidden": "vision_hidden"}
"""The axes of a text value, as the vision tower has them."""
SOUNDS: Final = {"batch": "audios", "seq": "frames", "hidden": "audio_hidden"}

_NOUNS: Final = {"images": "image", "frames": "video", "audios": "sound"}
_ENCODED: Final = {"images": "image", "frames": "video"}
"""What each kind is called in `mm_encoder_outputs`, which give a call its features ready-made."""


class PartOfTower(StandardEnvoy):
    """A tower, or a module of one."""

    FEEDS: ClassVar[tuple[str, ...]] = ()
    """What any of which makes the tower run: `images`, `frames`, `audios`."""

    FEEDS_OF: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The same for a value that other input brings about; none for one that every call computes."""

    @property
    def scatter(self) -> Any:
        """The module that puts features into the stream."""
        return self.root.stack.parent

    def rows(self, mediator: Mediator) -> slice:
        batcher = self.interleaver.batcher
        if batcher is None or mediator.batch_group is None or not batcher.batching or batcher.media is None:
            return slice(None)
        start, size, _ = batcher.media.items(
            batcher.media.kind(batcher.at, batcher.turn), mediator.batch_group
        )
        return slice(start, start + size)

    def first_pass(self, value: Served, mediator: Mediator) -> int:
        batcher, group = self.interleaver.batcher, mediator.batch_group
        feeds = self.FEEDS_OF.get(str(value.name), self.FEEDS)
        if len(feeds) < 2 or batcher is None or batcher.media is None or group is None:
            return 0
        # A tower runs on the images of all invokes first, then on the frames of their videos.
        given = [feed for feed in feeds if self.interleaver.encoding.get(GIVEN_BY[feed]) is not None]
        return next(place for place, feed in enumerate(given) if batcher.media.items(feed, group)[1])

    def check_runs(self, value: Served, mediator: Mediator, state: Any) -> None:
        feeds = self.FEEDS_OF.get(str(value.name), self.FEEDS)
        at_scatter = str(value.name) in self.FEEDS_OF
        reason = self._idle(feeds, mediator, state, at_scatter=at_scatter) if feeds else None
        if reason is None:
            return
        if mediator.copy:  # a stored edit
            reason += "\nA kept edit is made in every call: `try: ... except gemloupe.errors.NeverRan: pass`."
        raise NeverRan(f"{value.path_on(self)}: {reason}")

    def _idle(
        self, feeds: tuple[str, ...], mediator: Mediator, state: Any, *, at_scatter: bool
    ) -> str | None:
        """Why the present call, or the present step of it, computes nothing of what is fed by `feeds`.

        at_scatter: whether it is found where features enter the stream, whoever has computed them.
        """
        interleaver = self.interleaver
        encoding, what = interleaver.encoding, " or ".join(_NOUNS[feed] for feed in feeds)
        outputs = encoding.get("mm_encoder_outputs") or {}
        encoded = [feed for feed in feeds if outputs.get(_ENCODED.get(feed)) is not None]
        given = [feed for feed in feeds if encoding.get(GIVEN_BY[feed]) is not None]
        given += encoded if at_scatter else []
        if not given and encoded:
            return f"this call was given its {what} encoded (`mm_encoder_outputs`), so the tower did not run."
        if not given:
            return f"this call was given no {what}, so there is nothing to serve."
        batcher, group = interleaver.batcher, mediator.batch_group
        if batcher is not None and batcher.batching and batcher.media is not None and group is not None:
            given = [feed for feed in given if batcher.media.items(feed, group)[1]]
            if not given:
                return f"this invoke was given no {what} (another one was), so there is nothing to serve."
        step = mediator.iteration if mediator.iteration is not None else state.step
        if not step or step < len(given):  # a tower runs once on images, and once more on video
            return None
        if not interleaver.generating:
            return f"step {step} was asked for, and a forward has {len(given)} of it, from 0."
        if uses_cache(self.root):
            return (
                f"it is computed in the first step of a generation, with the prompt; step {step} has new "
                f"tokens and no {what}.\nRead it in step 0: `if step == 0: ...`, or before the loop."
            )
        return None


class PartOfBlockOfTower(PartOfTower):
    """A block of a tower, or a module inside one."""

    @property
    def block(self) -> Any:
        """The block this envoy belongs to."""
        return self.parent

    @property
    def block_plan(self) -> TowerBlockPlan:
        """What the config says of the block."""
        vision = self.block.standard_path.startswith("vision")
        plan = self.model_plan.vision if vision else self.model_plan.audio
        assert plan is not None  # there is a tower to be a part of
        return plan.blocks[self.block.index]

    @property
    def standard_path(self) -> str:
        return f"{self.block.standard_path}.{self.path.rpartition('.')[2]}"

    def _neighbours(self) -> list[tuple[str, type]]:
        block = self.block
        parts = (vars(block).get(name) for name in block._child_map)
        hosts = (block, *(part for part in parts if isinstance(part, PartOfBlockOfTower)))
        return [
            *super()._neighbours(),
            *((host.standard_path, type(host)) for host in hosts if host is not self),
        ]
