"""The command line: `python -m gemloupe tour`, `inspect TARGET`, `verify TARGET` and `harvest TARGET`.

What a command needs is imported when it runs: `--help` and `--version` import no torch. Exit status: 0, or
1 where the tour or a verification found something that does not hold or a harvest stopped midway, or 2 for a
target of which nothing can be said or a wrong option, in one line on stderr.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from . import __version__
from .errors import GemloupeError

if TYPE_CHECKING:
    from rich.console import Console

    from .standardized import StandardizedTransformer

__all__ = ["app"]

# Where nobody looks on, rich assumes 80 columns, too few for the table of blocks.
_WIDTH_OF_A_FILE = 120

app = typer.Typer(
    name="gemloupe",
    help="A jeweller's loupe for Gemma: read and edit anything inside a Gemma 4 model by one stable name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def tour(
    shape: Annotated[
        str, typer.Option(help="The tiny model's shape: e2b, e4b, 26b-a4b, 31b or 12b.")
    ] = "e2b",
) -> None:
    """Wrap a tiny Gemma 4 with random weights, read it, edit it, and check that the rules hold.

    Needs no network and no GPU, and takes a few seconds. Exit status 1 if a check does not hold.
    """
    with _quiet():
        from .testing import SHAPES
        from .tour import take_tour

        if shape not in SHAPES:
            _refuse(f"there is no tiny shape {shape!r}; the shapes are {', '.join(SHAPES)}.")
        held = take_tour(shape, _console())
    raise typer.Exit(0 if held else 1)


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="A repo id, a directory with a config.json, or tiny:SHAPE (tiny:SHAPE:wrapper).",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Print the card of a model, read from its config alone: its blocks, its values and its traps.

    Loads no weights. A repo id is looked up in the local cache and, if need be, on the hub.
    Exit status 2 if there is no config to read, or it is of a model that is not known.
    """
    with _quiet():
        from .card import read_card

        try:
            card = read_card(target)
        except GemloupeError as error:
            _refuse(str(error))
    if as_json:
        typer.echo(card.to_json())
    else:
        _console().print(card)


@app.command()
def verify(
    target: Annotated[
        str,
        typer.Argument(
            help="A repo id, a directory with weights, or tiny:SHAPE (tiny:SHAPE:wrapper).",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with a heatmap of value by block.", show_default=False)
    ] = None,
) -> None:
    """Compare every value of a model, on every block, with its float64 definition.

    Loads the weights and runs the model on fixed tokens; needs no tokenizer.
    For a text of your own there is gemloupe.verify(model, text) in Python.

    Exit status 0: every value holds. 1: some value is not what it should be.
    2: nothing can be said, for there is no such target, its weights are
    missing, quantized or not finite, or the definitions do not cover it.
    """
    with _quiet():
        from .reference.verification import verify as verified

        if html is not None and (html.is_dir() or not html.parent.is_dir()):
            _refuse(f"{html} is no file that can be written; give --html PATH in a directory that is there.")
        model = _loaded(target)
        try:
            report = replace(verified(model), model=target)
        except GemloupeError as error:
            _refuse(str(error))
    if as_json:
        typer.echo(report.to_json())
    else:
        _console().print(report)
    if html is not None:
        try:
            report.to_html(html)
        except OSError as error:
            _refuse(f"{html} cannot be written: {error}")
    raise typer.Exit(0 if report.held else 1)


@app.command()
def harvest(
    target: Annotated[
        str,
        typer.Argument(
            help="A repo id, a directory with weights, or tiny:SHAPE (tiny:SHAPE:wrapper).",
            show_default=False,
        ),
    ],
    values: Annotated[
        list[str],
        typer.Option(help="A value or a pattern, as layers.*.layer_output; repeatable.", show_default=False),
    ],
    given: Annotated[
        Path,
        typer.Option(
            "--input", help="A text file or JSONL (.jsonl), one sequence a line.", show_default=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The directory to write; one that an ended run left is gone on with.", show_default=False
        ),
    ],
    positions: Annotated[
        str, typer.Option(help="all, last, or content (no BOS, no padding, no special token).")
    ] = "all",
    sample: Annotated[
        int | None, typer.Option(help="Keep so many of these tokens per sequence.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Store as float32, bfloat16, float16 or float64; by default as the model computes.",
            show_default=False,
        ),
    ] = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Tokens of a batch, padding included.")] = 4096,
    shard_mib: Annotated[int, typer.Option(help="Largest shard, in MiB.")] = 256,
    truncate: Annotated[
        int | None, typer.Option(help="Keep the first tokens of longer sequences.", show_default=False)
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="The field of a JSONL row that holds the text or the ids; by default input_ids or text.",
            show_default=False,
        ),
    ] = None,
    robust: Annotated[
        bool, typer.Option("--robust", help="Also find massive activations and outlier dimensions.")
    ] = False,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Where the weights go: auto, cuda:0, ...; under torchrun each process's own GPU by default.",
            show_default=False,
        ),
    ] = None,
    model_dtype: Annotated[
        str | None,
        typer.Option(help="Compute in this dtype; by default in the checkpoint's.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of a repo.", show_default=False)
    ] = None,
) -> None:
    """Run a model over a file of texts and write values of every token to a directory of safetensors.

    The same command goes on with a run that ended early. Under torchrun each process takes its share. Exit
    status 1 if it stops midway: the disk is full, or a value is not finite.
    """
    with _quiet():
        import torch

        from .errors import HarvestStopped
        from .harvesting.positions import NAMES
        from .harvesting.run import harvest as harvested
        from .harvesting.work import DTYPES
        from .targets import is_tiny

        for option, name in (("--dtype", dtype), ("--model-dtype", model_dtype)):
            if name is not None and name not in DTYPES:
                _refuse(f"{option} is one of {', '.join(DTYPES)}, not {name!r}.")
        if positions not in NAMES:
            _refuse(f"--positions is one of {', '.join(NAMES)}, not {positions!r}.")
        if shard_mib < 1:
            _refuse(f"--shard-mib is a number of MiB, 1 or more, not {shard_mib}.")
        if not given.is_file():
            _refuse(f"there is no file {given}; give a text file or JSONL, one sequence a line.")
        local = os.environ.get("LOCAL_RANK")
        if device_map is None and local is not None and torch.cuda.is_available() and not is_tiny(target):
            device_map = f"cuda:{local}"
        asked = {"device_map": device_map, "dtype": model_dtype, "revision": revision}
        model = _loaded(target, text=True, **{name: each for name, each in asked.items() if each is not None})
        try:
            store = harvested(
                model,
                given,
                values,
                out,
                positions=cast(Any, positions),
                sample=sample,
                seed=seed,
                dtype=dtype,
                tokens_per_batch=tokens_per_batch,
                shard_bytes=shard_mib * 2**20,
                truncate=truncate,
                column=column,
                robust=robust,
            )
        except HarvestStopped as error:
            _refuse(str(error), status=1)
        except GemloupeError as error:
            _refuse(str(error))
        except KeyboardInterrupt:
            _refuse("harvest stopped by hand. Complete shards stay; the same command goes on.", status=130)
    if os.environ.get("RANK", "0") == "0":
        _console().print(store)


def _loaded(target: str, **options: Any) -> StandardizedTransformer:
    """The model of a target, with all its weights; else the end, in one line."""
    from safetensors import SafetensorError

    from .loading import missing_weights
    from .targets import load

    try:
        with missing_weights() as missing:
            model = load(target, **options)
            if not model.dispatched:
                model.dispatch()
    except GemloupeError as error:
        _refuse(str(error))
    except (OSError, SafetensorError) as error:
        _refuse(f"{target} cannot be read: {error}")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _refuse(f"{target} lacks {missing[0]}{more}: nothing can be said of what is made up.")
    return model


def _refuse(reason: str, status: int = 2) -> NoReturn:
    typer.echo(f"gemloupe: {' '.join(reason.split())}", err=True)
    raise typer.Exit(status)


def _console() -> Console:
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    # Layouts are written in brackets, which rich would take for its markup.
    return Console(width=None if wide else _WIDTH_OF_A_FILE, markup=False, highlight=False, emoji=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings, log lines and progress bars of the libraries below off the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from huggingface_hub.utils import logging as hub
        from transformers.utils import logging as transformers

        verbosity, bars = (
            (transformers.get_verbosity(), hub.get_verbosity()),
            transformers.is_progress_bar_enabled(),
        )
        transformers.set_verbosity_error()
        hub.set_verbosity_error()
        transformers.disable_progress_bar()  # the hub's too
        try:
            yield
        finally:
            transformers.set_verbosity(verbosity[0])
            hub.set_verbosity(verbosity[1])
            if bars:
                transformers.enable_progress_bar()
