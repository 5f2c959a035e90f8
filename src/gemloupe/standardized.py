"""`StandardizedTransformer`: a Gemma 4 model, as transformers runs it, under one set of names."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nnsight.intervention.envoy import Envoy
from nnsight.modeling.tp import TPFragments
from nnsight.modeling.tp.envoys import tp_envoys, wants_tensor_parallel
from nnsight.modeling.transformers import TransformersModel

from . import capture, generation, geometry, lens, media, steering, support
from .arguments import check_inputs
from .batching import StandardBatcher
from .envoys.base import StandardEnvoy
from .envoys.root import Root
from .envoys.scatter import KINDS as SCATTERED
from .errors import BadArgument
from .families import family
from .ledger import StandardInterleaver
from .loading import check_weights, read_config, text_config
from .media_checks import MediaCount, check_media
from .processors import check_media_keywords, find_preprocessors, pipeline_task
from .prompts import CACHES, check_prompt, hides_new_tokens, text_positions
from .tracer import StandardEditor, StandardTracer
from .workers import keep_prompt

if TYPE_CHECKING:
    from .references import Reference

__all__ = ["StandardizedTransformer"]


class StandardizedTransformer(Root, TransformersModel):
    """A Gemma 4 model whose values are read and edited by standard names.

    `target` is a repo id, a directory written by `save_pretrained`, or a loaded module. The config is
    read first, so an unsupported model is refused before any weight loads; the tree is then built
    without weights, which load when a forward first runs (`dispatch=True` loads them at once).

    Everything nnsight's `TransformersModel` takes is passed on: `dtype`, `device`, `device_map`,
    `attn_implementation`, `experts_implementation`, `revision`, `task`, `tokenizer`, `processor`, `peft`,
    and more rows for `rename` and `envoys`.

    With `task="image-text-to-text"` or `"any-to-any"` the processor that lies beside the weights is loaded
    too, and a trace takes images, video frames and sound: `model.trace("a cat <|image|>", images=[picture])`.
    A `processor=` does the same for a loaded module.

    Raises: UnsupportedModel, for another architecture or a config field that was not considered;
    LoadError, where there is no config or there are no weights, or where the processor is another model's.

        model = StandardizedTransformer("google/gemma-4-E2B")
        with model.trace("The capital of France is"):
            stream = model.layers[10].layer_output.save()
    """

    interleaver: StandardInterleaver
    _batcher_class: ClassVar[type[StandardBatcher]] = StandardBatcher

    def __init__(self, target: Any, *args: Any, task: str | None = None, **kwargs: Any) -> None:
        config = kwargs.get("config") or read_config(target, **kwargs)
        self.family = family(text_config(config).model_type)
        self.plan = self.family.plan(config)
        check_weights(target)
        envoys = tp_envoys() if wants_tensor_parallel(target, kwargs) else {}
        kwargs["rename"] = {**self.family.rename, **(kwargs.get("rename") or {})}
        kwargs["envoys"] = {**envoys, **self.family.envoys, **(kwargs.get("envoys") or {})}
        kwargs.setdefault("interleaver", StandardInterleaver(fragments=TPFragments()))
        # nnsight 0.8.1 does not see that a pipeline of transformers 5.24 needs a tokenizer. One that is given
        # none beside its processor would have texts padded on the right, as sound is.
        kwargs |= find_preprocessors(target, config, task, kwargs)
        self._ready = False
        target = str(target) if isinstance(target, Path) else target
        super().__init__(target, *args, task=pipeline_task(task), **kwargs)
        self._check_operations()

    # -- facts -----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Blocks of the text stack."""
        return self.plan.num_layers

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.plan.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens the head scores."""
        return self.plan.vocab_size

    @property
    def num_heads(self) -> int:
        """Query heads of a block."""
        return self.plan.num_heads

    @property
    def head_dim(self) -> int:
        """The config's top-level head width, which is the sliding blocks'."""
        return self.plan.head_dim

    @property
    def num_kv_heads(self) -> int:
        """The config's top-level number of key and value heads, which is the sliding blocks'."""
        return self.plan.num_kv_heads

    def kv_sharing(self) -> dict[int, tuple[int, ...]]:
        """Which blocks lend their keys and values, and to which."""
        return self.plan.kv_sharing()

    # -- what there is ---------------------------------------------------------------------------

    def has(self, value: str | Reference) -> bool:
        """Whether this model has a value, given by path or reference, without running it.

        Raises: UnknownName, for a path that names no standard value.
        """
        return support.why_not(self, value) is None

    def why_not(self, value: str | Reference) -> str | None:
        """Why this model lacks a value and what to use instead, or `None` where it has it.

        Raises: UnknownName, for a path that names no standard value.
        """
        return support.why_not(self, value)

    def support(self) -> support.Support:
        """Every standard value, and on which blocks this model has it."""
        return support.support(self)

    # -- verbs -----------------------------------------------------------------------------------

    # Each is a function of the model: its docstring and its signature are what `help` shows.
    project_on_vocab = lens.project_on_vocab
    top_tokens = lens.top_tokens
    skip_layers = steering.skip_layers
    steer = steering.steer
    intervene = steering.intervene
    collect = capture.collect
    record = capture.record
    image_geometry = geometry.image_geometry
    video_geometry = geometry.video_geometry

    # -- running ---------------------------------------------------------------------------------

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """Open a trace: one forward, beside which the block reads and edits values.

        As nnsight's `trace`, whose arguments it takes. `generate` opens one over a whole generation; there
        `full_prefill=False` asks for transformers' fast path, in which the blocks that borrow keys and
        values (E2B, E4B) run on the last prompt position alone.
        """
        check_inputs(inputs)
        if kwargs.get("tracer_cls") is None:
            kwargs["tracer_cls"] = StandardTracer
        return super().trace(*inputs, **kwargs)

    def edit(self, *, inplace: bool = False, backend: Any = None) -> Any:
        """Open a block whose edits are made in every later call, of a copy or of this model itself.

        `with model.edit() as (tracer, edited):` edits `edited`; `with model.edit(inplace=True) as tracer:`
        edits `model`, until `model.clear_edits()`. In `generate` an edit is made in the first step, unless
        it stands in `for step in tracer.iter[:]` or is `steer`, `intervene` or `skip_layers`.
        """
        return StandardEditor(self, inplace=inplace, backend=backend)

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.dispatched and not _faking():
            self.dispatch()
        self._instrument()
        batcher = kwargs.get("batcher")
        given = {} if batcher is None else {k: v for _, invoke in batcher.invokes for k, v in invoke.items()}
        self.interleaver.options = {**given, **kwargs}
        self.interleaver.entrance = self.location("input")
        if batcher is not None and batcher.batching:
            generation.one_row_each(self)
        if batcher is None:
            kwargs.pop("full_prefill", None)  # an untraced call runs as transformers runs it
        elif self.interleaver.full_prefill and self._drops_prompt():
            self.interleaver.mediators.append(keep_prompt(self))
        return super().interleave(fn, *args, **kwargs)

    def _drops_prompt(self) -> bool:
        """Whether this transformers release drops prompt positions before blocks that borrow."""
        borrows = any(block.borrows_keys for block in self.plan.blocks)
        return borrows and self.stack.labels["drop_prompt"] is not None

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        rows = media.rows_in(inputs, kwargs)
        return super()._batch_size(*inputs, **kwargs) if rows is None else rows

    def _batch(self, invokes: list, fn: Any) -> tuple:
        each: list[dict[str, Any]] = []
        if len(invokes) > 1 and _gives(invokes, "mm_encoder_outputs"):
            raise BadArgument(
                "`mm_encoder_outputs` are of a whole call: give them where one invoke is alone."
            )
        if any(media.has_media(*invoke, chats=self.processor is not None) for invoke in invokes):
            names = {name for _, options in invokes for name in options}
            check_media_keywords(self.processor, self.plan.wrapper, names)
            kwargs, each = media.join(self, invokes)
            args: tuple = ()
        else:
            args, kwargs = super()._batch(invokes, fn)
        generating = getattr(fn, "__name__", "") == "generate"
        # What `trace` is given beside its invokes is laid over their batch.
        extra = self.interleaver.batcher.extra_kwargs
        config: Any = self._module.config
        sizes = check_media(config, {**kwargs, **extra})
        inner = type(self.stack.parent._module)
        if sizes.frames and not generating and not media.hands_on_frames(inner):
            raise BadArgument(
                f"{inner.__name__}.forward of this transformers release drops `num_frames_per_video`, which "
                f"its tower then asks for.\nInstall transformers 5.24 to trace a call with video."
            )
        encoded = {**kwargs, **extra}.get("mm_encoder_outputs")
        typed = "mm_token_type_ids" in {**kwargs, **extra} or "input_ids" not in kwargs
        if sizes.given and _faking():
            raise BadArgument(
                "scan cannot run images, video or sound: how many soft tokens they make is known from their "
                "pixels and masks, not from shapes.\nTrace them."
            )
        if (sizes.given or encoded) and not typed:
            kwargs["mm_token_type_ids"] = media.token_types(config, kwargs["input_ids"])
        beside = {name: extra[name] for name in (*CACHES, "attention_mask", "position_ids") if name in extra}
        masked = "attention_mask" in beside
        if not generating:
            if hides_new_tokens({**kwargs, **beside}, given=masked or _gives(invokes, "attention_mask")):
                del kwargs["attention_mask"]
            if "position_ids" not in beside and not _gives(invokes, "position_ids"):
                if masked:  # nnsight counted by a mask of its own
                    kwargs.pop("position_ids", None)
                kwargs = {**text_positions({**kwargs, **beside}), **kwargs}
        self.interleaver.encoding = {**kwargs, **beside}
        self.interleaver.generating = generating
        if len(each) > 1 and sizes.given:
            self.interleaver.batcher.media = self._media_rows(sizes, each)
        check_prompt(self.tokenizer, self.interleaver.encoding)
        return args, kwargs

    def _media_rows(self, sizes: MediaCount, each: list[dict[str, Any]]) -> media.MediaRows:
        """Whose images, frames and sounds are whose, in a batch of several invokes."""
        counts = [
            {kind: len(encoding[name]) for kind, name in media.GIVEN_BY.items() if name in encoding}
            | {"videos": len(encoding.get("num_frames_per_video", ()))}
            for encoding in each
        ]
        starts = accumulate((encoding["input_ids"].shape[0] for encoding in each[:-1]), initial=0)
        inner = self.stack.parent
        towers: dict[str, tuple[str, ...]] = {}
        for name, kinds in media.TOWERS.items():
            if support.why_not(self, name) is None:
                towers[f"{getattr(self, name).path}."] = kinds
        for name, kinds in SCATTERED.items():
            towers[inner.location(f"source.{name}.output")] = kinds
        calls = (self.location("input"), inner.location("input"))
        return media.MediaRows(sizes, counts, starts, towers, calls)

    # -- operations ------------------------------------------------------------------------------

    def _update(self, module: Any) -> None:
        self._ready = False
        super()._update(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandardizedTransformer:
        """A model of its own, weights and stored edits included."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo.setdefault(id(self.interleaver), type(self.interleaver)(fragments=TPFragments()))
        # What an edit names comes with it; Python does not copy a library (`torch`).
        memo.update({id(library): library for library in tuple(sys.modules.values())})
        mine = {name: value for name, value in self.__dict__.items() if name != "_parent"}
        Envoy.__setstate__(copied, {name: copy.deepcopy(value, memo) for name, value in mine.items()})
        # A copied module is as it was before nnsight wrapped and instrumented it.
        copied._update(copied._module)
        for envoy in copied._sourced():
            envoy.__dict__.pop("_labels", None)
        for name, child in copied._named_children():
            if name not in copied._module._modules:
                child._update(child._module)
        return copied

    def _sourced(self) -> list[StandardEnvoy]:
        return self.modules(lambda envoy: isinstance(envoy, StandardEnvoy) and bool(envoy.OPERATIONS))

    def _check_operations(self) -> None:
        """Refuse at load a transformers release that moved a line a value is served from."""
        seen = set()
        for envoy in self._sourced():
            if type(envoy._module) not in seen:
                seen.add(type(envoy._module))
                _ = envoy.labels

    def _instrument(self) -> None:
        """Instrument every forward that values are served from inside, once per module.

        Before the first run, not at load: a model that is only looked at, or called as a plain module,
        pays nothing. nnsight cannot instrument a forward that is running.
        """
        if self._ready:
            return
        for envoy in self._sourced():
            _ = envoy.labels
        self._ready = True


def _faking() -> bool:
    from torch._guards import detect_fake_mode

    return detect_fake_mode() is not None


def _gives(invokes: list, name: str) -> bool:
    """Whether some invoke was given an argument of the model's call, such as an attention mask."""
    parts = [part for inputs, options in invokes for part in (*inputs, options)]
    return any(isinstance(part, Mapping) and name in part for part in parts)
