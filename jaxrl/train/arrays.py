"""``arrays.zarr``: what a run measures every step, as named arrays through tensorstore."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from jaxrl.train.record import WriteFailed, write_json


class ArrayStore:
    """Arrays by name. Floating arrays are NaN where nothing was written.

    Methods that write raise ``WriteFailed`` when the file system refuses.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.open: dict[str, ts.TensorStore] = {}

    def require(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Open an array for ``write``, creating it, or growing it along its first axis to ``shape``.

        One chunk a leading index, so that a step writes its own file.
        """
        with self._writing(name):
            if (self.root / name / ".zarray").exists():
                store = ts.open(self._spec(name), open=True).result()
                if store.shape[0] < shape[0]:
                    store = store.resize(exclusive_max=list(shape), expand_only=True).result()
            else:
                store = self._create(name, shape, dtype)
            self.open[name] = store

    def write(self, name: str, index: int, value: Any) -> None:
        """Store row ``index`` of an array that ``require`` opened."""
        with self._writing(name):
            self.open[name][index].write(np.asarray(value)).result()

    def put(self, name: str, value: Any, attributes: Mapping[str, Any] | None = None) -> None:
        """Store one whole array in the place of an earlier one, with attributes beside it (``.zattrs``)."""
        value = np.asarray(value)
        with self._writing(name):
            self._create(name, value.shape, value.dtype.str).write(value).result()
        if attributes:
            write_json(self.root / name / ".zattrs", dict(attributes))

    def read(self, name: str) -> np.ndarray:
        """A whole array as numpy."""
        return ts.open(self._spec(name), open=True).result().read().result()

    def _spec(self, name: str) -> dict[str, Any]:
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{self.root / name}/"}}

    def _create(self, name: str, shape: tuple[int, ...], dtype: str) -> ts.TensorStore:
        kind = np.dtype(dtype)
        metadata = {
            "shape": list(shape),
            "chunks": [1, *shape[1:]] if len(shape) > 1 else list(shape),
            "dtype": kind.str,
            "fill_value": "NaN" if kind.kind == "f" else False if kind.kind == "b" else 0,
        }
        return ts.open(self._spec(name) | {"metadata": metadata}, create=True, delete_existing=True).result()

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore has no type of its own for a full disk
            raise WriteFailed.of(self.root / name, error) from error
