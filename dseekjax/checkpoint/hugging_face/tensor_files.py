"""The safetensors files of a folder, read slice by slice."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - tells NumPy, and through it safetensors, of bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from dseekjax.checkpoint.hugging_face.config_json import read_json
from dseekjax.checkpoint.hugging_face.mapping import Index
from dseekjax.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
AS_MANY_AS_ARE_LISTED = 12


class TensorFiles:
    """Tensors by name, wherever they lie. Opening reads headers alone."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            UserError: a file is missing, cut short or of another format, or the index places tensors otherwise.
        """
        self._slices: dict[str, Any] = {}
        self._places: dict[str, Path] = {}
        # They have to stay: slices read from the memory that they map.
        listed = None if (folder / SINGLE).is_file() else _listed(folder)
        names = [SINGLE] if listed is None else _file_names(folder, listed)
        self._files = [self._open(folder / name) for name in names]
        if listed is not None:
            self._refuse_other_places(folder, listed)

    def _open(self, path: Path) -> Any:
        try:
            # The library says of any file that it cannot open that there is none.
            with path.open("rb"):
                file = safe_open(path, "numpy")
        except SafetensorError as error:
            raise UserError(
                f"{path} is cut short, or no safetensors file ({str(error).removeprefix('Error while ')}); fetch it "
                "again"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot read {path} ({error.strerror or error}); make it readable, or fetch it again"
            ) from error
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if name in self._slices:
                raise UserError(f"{path}: {name} is in {self._places[name].name} too; fetch the folder again")
            self._slices[name], self._places[name] = file.get_slice(name), path
        return file

    def _refuse_other_places(self, folder: Path, listed: dict[str, str]) -> None:
        found = {name: path.name for name, path in self._places.items()}
        gone = {name for name in listed if name not in found}
        unlisted = {name for name in found if name not in listed}
        elsewhere = sorted(name for name in listed.keys() & found.keys() if listed[name] != found[name])
        problems = [f"it lists {some(gone)}, which no file holds"] * bool(gone)
        problems += [f"the files hold {some(unlisted)}, which it does not list"] * bool(unlisted)
        problems += [f"it lists {name} in {listed[name]}, which is in {found[name]}" for name in elsewhere[:1]]
        if problems:
            raise UserError(
                f"{folder / INDEX} is not of the files beside it: {'; '.join(problems)}; fetch the folder again"
            )

    @property
    def names(self) -> set[str]:
        return set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def refuse_other_dtype(self, name: str) -> None:
        """Raises UserError if a tensor is of a dtype that is not read here, as some are that no model needs."""
        dtype = self._slices[name].get_dtype()
        if dtype not in DTYPES:
            raise UserError(
                f"{self._places[name]}: {name} is of the dtype {dtype}; give a checkpoint in one of {', '.join(DTYPES)}"
            )

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, in the dtype that it has on disk; no more than that is read."""
        part: np.ndarray = self._slices[name][index]
        return part


def _listed(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index lists them."""
    if (folder / INDEX).is_file():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise UserError(f"{folder / INDEX} has no weight_map; fetch it again")
        return {name: Path(str(file)).name for name, file in placed.items()}
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        raise UserError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code when it is opened and so is "
            "never opened here; where you trust it, make safetensors of it with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    raise UserError(f"there is no {SINGLE} and no {INDEX} in {folder}; give a folder that holds a whole model")


def _file_names(folder: Path, listed: dict[str, str]) -> list[str]:
    names = sorted(set(listed.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder}: {some(missing)} of the {len(names)} files that {INDEX} lists "
            f"{'is' if len(missing) == 1 else 'are'} missing; fetch {'it' if len(missing) == 1 else 'them'} again"
        )
    return names


def some(names: Iterable[str]) -> str:
    """Names in a row: those that differ only in a layer's number are put together, and a long rest is counted."""
    together: dict[str, list[str]] = {}
    for name in sorted(names):
        together.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1), []).append(name)
    shown = [which[0] if len(which) == 1 else f"{name} ({len(which)})" for name, which in together.items()]
    more = len(shown) - AS_MANY_AS_ARE_LISTED
    return ", ".join(shown[:AS_MANY_AS_ARE_LISTED]) + (f" and {more} more" if more > 0 else "")
