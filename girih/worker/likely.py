"""Drawing from the most likely tokens alone, where top-k or top-p leave few: the vocabulary is read, but not sorted.

    scaled logits -> the 64 largest of a row; where it needs more, the 1,024 largest -> who of them is left -> draw

A row whose last token left is as likely as the first one left out, or that needs still more, is not drawn here: the
sampler looks at all of its tokens.
"""

from __future__ import annotations

import numpy as np
import torch

WIDTHS = (64, 1024)
"""Tokens to look at, at first and then."""


def draw_likely(scaled: torch.Tensor, params: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw a token for each row that few tokens decide.

    Args:
        scaled: float32 [m, vocab_size], logits below the largest, over the temperature.
        params: `girih.worker.sampler.PARAMS_DTYPE` [m].
        uniforms: float64 [m].

    Returns:
        int32 [m]; -1 for rows to look at as a whole.
    """
    vocab_size = scaled.shape[1]
    token_ids = np.full(len(scaled), -1, np.int32)
    top_k = np.where(params["top_k"] > 0, np.minimum(params["top_k"], vocab_size), vocab_size)
    pending = np.flatnonzero((top_k < vocab_size) | (params["top_p"] < 1))
    for width in WIDTHS:
        # top-k alone says how many it needs
        rows = pending[(top_k[pending] <= width) | (top_k[pending] == vocab_size)]
        if rows.size and width < vocab_size:
            some = scaled if rows.size == len(scaled) else scaled[torch.from_numpy(rows)]
            token_ids[rows] = _draw(some, width, top_k[rows], params[rows], uniforms[rows])
            pending = pending[token_ids[pending] < 0]
    return token_ids


def draw(probabilities: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """Return the places int64 [m] where the sums of each row pass a share of the whole.

    Args:
        probabilities: float32 [m, n], not all 0; a place with 0 is never returned.
        uniforms: float64 [m], the shares, below 1.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # strictly below the total, so that the first larger sum is always that of a token that was kept
    target = torch.minimum(torch.from_numpy(uniforms).unsqueeze(1) * total, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _draw(scaled: torch.Tensor, width: int, top_k: np.ndarray, params: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draw from the `width` likeliest tokens of each row: int32 [m], -1 where they are not enough.

    Args:
        scaled: as in `draw_likely`; one token more than `width` at least.
        width: tokens to look at.
        top_k: int64 [m], `width` at most, or the whole vocabulary.
        params: as in `draw_likely`.
        uniforms: as in `draw_likely`.
    """
    most, top_p, min_p = (torch.from_numpy(column).unsqueeze(1) for column in (top_k, params["top_p"], params["min_p"]))
    values, ids = scaled.topk(width + 1, dim=-1)
    place = torch.arange(width)
    probabilities = values[:, :width].masked_fill(place >= most, -torch.inf).softmax(dim=-1)
    if (top_k > width).any():  # of all tokens, not of those kept
        probabilities = torch.where(most > width, scaled.softmax(dim=-1).gather(1, ids[:, :width]), probabilities)
    reached = probabilities.cumsum(dim=-1, dtype=torch.float64)
    enough = torch.where(top_p < 1, (reached < top_p).sum(dim=-1, keepdim=True) + 1, most)
    num_kept = torch.minimum(most, enough).clamp(max=width)
    last, first_left_out = values.gather(1, num_kept - 1), values.gather(1, num_kept)
    is_known = (torch.minimum(most, enough) <= width) & (last > first_left_out)
    is_kept = (place < num_kept) & (probabilities >= probabilities[:, :1] * min_p.float())
    order = ids[:, :width].argsort(dim=-1)  # so that nothing depends on how many were looked at
    drawn = draw(probabilities.where(is_kept, 0).gather(1, order), uniforms).unsqueeze(1)
    token_ids = ids.gather(1, order.gather(1, drawn))
    return token_ids.where(is_known, -1).squeeze(1).int().numpy()
