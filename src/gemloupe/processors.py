"""The processor and the tokenizer a model is wrapped with, and whether they are this model's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from .errors import BadArgument, LoadError
from .media_checks import feature_width, kernel_side, patch_side
from .plan import WRAPPERS
from .tokens import NoTokenizer, find_tokenizer

__all__ = [
    "MULTIMODAL",
    "check_media_keywords",
    "check_processor",
    "find_preprocessors",
    "find_processor",
    "pipeline_task",
]

MULTIMODAL: Final = ("image-text-to-text", "any-to-any")
"""The tasks whose pipelines prepare their input with a processor."""

_MEDIA: Final = ("images", "image", "videos", "video", "audio", "audios")
_MEANT: Final = {"image": "images", "video": "videos", "audios": "audio"}
"""Keywords of other processors that nnsight hands on, and what Gemma 4's calls them."""

_PROCESSORS: Final = {"gemma4": "Gemma4Processor", "gemma4_unified": "Gemma4UnifiedProcessor"}


def find_preprocessors(
    target: Any, config: Any, task: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The `tokenizer` and the `processor` that a model is wrapped with: those given, or those beside it.

    A processor is looked for where the task needs one. The tokenizer is then the processor's own.

    Raises: LoadError, where there is none to be found, or where it is another model's.
    """
    tokenizer, processor = given.get("tokenizer"), given.get("processor")
    source: dict[str, Any] = {
        "revision": given.get("revision"),
        "trust_remote_code": given.get("trust_remote_code") or False,
    }
    if (task in MULTIMODAL or processor is not None) and config.model_type not in WRAPPERS:
        asked = f'task="{task}"' if task in MULTIMODAL else "`processor=`"
        raise LoadError(
            f"{asked} is for a model that takes images, and this is the text model alone "
            f"({config.model_type}). Load the whole one, whose config is a "
            f"{config.model_type.removesuffix('_text')}: a published repo, or a *ForConditionalGeneration."
        )
    if isinstance(processor, (str, Path)):
        processor = find_processor(processor, config, tokenizer=tokenizer, **source)
    elif processor is None and task in MULTIMODAL:
        processor = find_processor(target, config, tokenizer=tokenizer, **source)
    if processor is None:
        if tokenizer is None:
            tokenizer = find_tokenizer(target, config.get_text_config(), **source)
        return {"tokenizer": tokenizer}
    check_processor(processor, config)
    return {"tokenizer": processor.tokenizer if tokenizer is None else tokenizer, "processor": processor}


def pipeline_task(task: str | None) -> str:
    """The pipeline that prepares a model's input: text generation's, unless another is asked for.

    transformers' "any-to-any" wants torchvision whatever it is given. Without it "image-text-to-text" stands
    in: the same model and the same processor, sound included.
    """
    if task == "any-to-any" and not find_spec("torchvision"):
        return "image-text-to-text"
    return task or "text-generation"


def find_processor(
    target: Any,
    config: Any,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The processor that lies beside the weights of a repo id, a directory or a loaded module.

    transformers' own where torchvision is installed. Without it, which transformers asks for even where no
    video is given, one composed of the parts that do without: see `composed.ComposedProcessor`.

    Raises: LoadError, where there is none, or where pillow is not installed.
    """
    module = isinstance(target, torch.nn.Module)
    name = getattr(target, "name_or_path", None) if module else str(target)
    if not name:
        raise LoadError(
            "this module was not loaded from a directory or repo id, so no processor lies beside it; give "
            "`processor=AutoProcessor.from_pretrained(...)`."
        )
    if not find_spec("PIL"):
        raise LoadError(
            "images are read with pillow, which is not installed: `pip install gemloupe[vision]`."
        )
    try:
        if find_spec("torchvision"):
            from transformers import AutoProcessor

            return AutoProcessor.from_pretrained(
                name, revision=revision or "main", trust_remote_code=trust_remote_code
            )
        settings = _settings(name, config, revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise LoadError(f"{name} has no processor that loads; give `processor=...`. ({first})") from error
    if tokenizer is None:
        tokenizer = find_tokenizer(
            target, config.get_text_config(), revision=revision, trust_remote_code=trust_remote_code
        )
    if isinstance(tokenizer, NoTokenizer):
        raise LoadError(f"{name} has no tokenizer, which its processor needs; give `processor=...`.")
    from .composed import compose

    return compose(settings, tokenizer, chat_template=settings.pop("chat_template", None))


def _settings(name: str, config: Any, revision: str | None) -> dict[str, Any]:
    """What a processor's files say; `preprocessor_config.json` is the older one, of the images alone.

    Raises: OSError, where there is neither.
    """
    from transformers import Gemma4ImageProcessorPil, ProcessorMixin

    source = {"revision": revision or "main"}
    settings = dict(ProcessorMixin.get_processor_dict(name, **source)[0])
    if "image_processor" not in settings:
        settings["image_processor"] = Gemma4ImageProcessorPil.get_image_processor_dict(name, **source)[0]
    return {"processor_class": _PROCESSORS[config.model_type], **settings}


# -- is it this model's own? --------------------------------------------------------------------------------


def check_processor(processor: Any, config: Any) -> None:
    """Refuse the processor of another model.

    Raises: LoadError, naming what differs and both numbers.
    """
    reason = next(_differences(processor, config), None)
    if reason is not None:
        raise LoadError(
            f"the processor is another model's: {reason}. Give this model's own, "
            f"`processor=AutoProcessor.from_pretrained(...)`."
        )


def _differences(processor: Any, config: Any) -> Iterator[str]:
    tokenizer, image = (getattr(processor, name, None) for name in ("tokenizer", "image_processor"))
    if tokenizer is None or image is None:
        yield f"{type(processor).__name__} has no {'tokenizer' if tokenizer is None else 'image_processor'}"
        return
    if config.vision_config is not None:
        yield from _image_differences(image, config)
    sound = getattr(processor, "feature_extractor", None)
    if config.audio_config is not None and sound is not None:
        width, what = feature_width(config.audio_config)
        theirs = getattr(sound, "audio_samples_per_token", sound.feature_size)
        if theirs != width:
            yield f"its sound has {theirs} numbers a frame, the model's {width} {what}"
    yield from _token_differences(processor, tokenizer, config)


def _image_differences(image: Any, config: Any) -> Iterator[str]:
    # The unified processor's patches come merged; a composed one's are as large from the start.
    merged = type(image).__name__.startswith("Gemma4Unified")
    side = image.patch_size * (image.pooling_kernel_size if merged else 1)
    pooled = 1 if merged else image.pooling_kernel_size
    wanted, kernel = patch_side(config), kernel_side(config)
    if side != wanted:
        yield f"its patches are {side} x {side} pixels, the model's {wanted} x {wanted}"
    if pooled != kernel:
        yield f"it pools {pooled} x {pooled} patches into a token, the model {kernel} x {kernel}"


def _token_differences(processor: Any, tokenizer: Any, config: Any) -> Iterator[str]:
    known, size = config.get_text_config().vocab_size, len(tokenizer)
    if size > known:
        yield f"its tokenizer knows {size} tokens, the model {known}"
    for kind in ("image", "video", "audio", "boi", "boa"):
        token = getattr(processor, f"{kind}_token", None)
        wanted = getattr(config, f"{kind}_token_id", None)
        found = tokenizer.convert_tokens_to_ids(token) if token else None
        if found is not None and wanted is not None and found != wanted:
            yield f"{token} is token {found} of its tokenizer, and {kind}_token_id is {wanted}"


# -- keywords of a processor --------------------------------------------------------------------------------


def check_media_keywords(processor: Any, wrapper: bool, names: set[str]) -> None:
    """Refuse keywords that a processor would take, where there is none, and those that this one would not.

    Raises: BadArgument.
    """
    name = next((name for name in _MEDIA if name in names), None)
    if processor is not None:
        wrong = next((name for name in _MEANT if name in names), None)
        if wrong is not None:
            raise BadArgument(f"the processor takes no `{wrong}=`. Did you mean `{_MEANT[wrong]}`?")
        return
    if name is None:
        return
    if not wrapper:
        raise BadArgument(
            f"`{name}=`: this is the text model alone. Load the whole one: `StandardizedTransformer(..., "
            f'task="image-text-to-text")`.'
        )
    raise BadArgument(
        f"`{name}=` is read by a processor, and this model was loaded without one. Load it with "
        f'`task="image-text-to-text"`, or give it one: `processor=AutoProcessor.from_pretrained(...)`.'
    )
