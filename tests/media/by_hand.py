"""Media inputs made by hand, without any processor: patches, positions, features and placeholder tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from gemloupe.testing import tiny_tokenizer

PLACEHOLDERS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}


def token_id(kind: str) -> int:
    number = tiny_tokenizer().convert_tokens_to_ids(PLACEHOLDERS[kind])
    assert isinstance(number, int)
    return number


def ids(*rows: str | list[int], kind: str = "image") -> Tensor:
    """Rows of tokens: runs of placeholders of the given lengths with a letter around each, padded left."""
    letter, mark = 60, token_id(kind)
    made = []
    for row in rows:
        tokens = [2, letter]
        for length in row:
            tokens += [*[mark] * int(length), letter]
        made.append(tokens)
    width = max(map(len, made))
    return torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in made])


def grid(columns: int, rows: int, patches: int) -> Tensor:
    """Positions (x, y) of one image's patches, row by row, then padding."""
    real = [(x, y) for y in range(rows) for x in range(columns)]
    return torch.tensor(real + [(-1, -1)] * (patches - len(real)))


def pictures(shape: str, *grids: tuple[int, int], patches: int = 48, seed: int = 0) -> dict[str, Tensor]:
    """Random images of so many columns and rows of soft tokens."""
    k, width = (1, 192) if shape == "12b" else (2, 48)
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.rand(len(grids), patches, width, generator=generator),
        "image_position_ids": torch.stack([grid(k * c, k * r, patches) for c, r in grids]),
    }


def films(shape: str, *videos: tuple[int, int, int], patches: int = 48) -> dict[str, Tensor]:
    """Random videos of so many frames, columns and rows of soft tokens."""
    frames = pictures(shape, *[(c, r) for n, c, r in videos for _ in range(n)], patches=patches)
    return {
        "pixel_values_videos": frames["pixel_values"],
        "video_position_ids": frames["image_position_ids"],
        "num_frames_per_video": torch.tensor([n for n, _, _ in videos]),
    }


def sounds(shape: str, *frames: int, seed: int = 0) -> dict[str, Tensor]:
    """Random sound of so many real frames each, padded on the right."""
    width, longest = 20 if shape == "12b" else 16, max(frames)
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(len(frames), longest, width, generator=generator),
        "input_features_mask": torch.arange(longest) < torch.tensor(frames)[:, None],
    }
