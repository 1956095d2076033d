"""The output matrix for a part of the vocabulary (the idea is FR-Spec's, Zhao et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_engine.model.base import Vocabulary
from paceline_engine.model.ops import linear
from paceline_engine.quant.matrix import Matrix, select_rows


class OutputHead:
    """One variant's output matrix; keeps the rows of the common tokens side by side."""

    def __init__(self, output: Matrix) -> None:
        self._output = output
        self._common_ids: tuple[int, ...] = ()
        self._common: tuple[Tensor, Matrix] | None = None

    def logits(self, hidden: Tensor, vocabulary: Vocabulary) -> Tensor:
        """fp32 [R, vocab] for hidden fp32 [R, hidden]; minus infinity outside of ``vocabulary``."""
        logits = hidden.new_full((hidden.shape[0], self._output.shape[0]), -torch.inf)
        ids, matrix = self._of_common(vocabulary.common_ids, hidden.device)
        logits[:, ids] = linear(hidden, matrix)
        if vocabulary.extra_ids:
            extra = torch.tensor(vocabulary.extra_ids, device=hidden.device)
            logits[:, extra] = linear(hidden, select_rows(self._output, extra))
        return logits

    def _of_common(self, ids: tuple[int, ...], device: torch.device) -> tuple[Tensor, Matrix]:
        if self._common is None or ids is not self._common_ids:
            rows = torch.tensor(ids, device=device)
            self._common_ids, self._common = ids, (rows, select_rows(self._output, rows))
        return self._common
