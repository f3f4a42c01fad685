"""Folders of ELMo as released (allenai/bilm-tf, allenai/allennlp): options.json and weights.hdf5.

The names of both files may have something before them, as those that are offered for download do.
The softmax is not in the file, so such a model cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.base.files import read_json_object

OPTIONS, HDF5 = "options.json", ".hdf5"
PICKLED_WEIGHTS = "weights.th"
NUMBERS = 262  # bytes and borders; "n_characters" counts the padding, or not
GATES = 0, 2, 1, 3  # TensorFlow's order is i, g, f, o, PyTorch's i, f, g, o


def options_path(folder: Path) -> Path | None:
    """The options of a folder, if it has any. Errors: ValueError for several."""
    return _only(folder, OPTIONS)


def weights_path(folder: Path) -> Path | None:
    """The weights of a folder, if it has any. Errors: ValueError for several, or pickled ones."""
    found = _only(folder, f"weights{HDF5}")
    if found is None and options_path(folder) and (pickled := _only(folder, PICKLED_WEIGHTS)):
        raise ValueError(
            f"{pickled}: pickled weights, which can run programs, are not read: take the "
            f"weights{HDF5} of the same model"
        )
    return found


def _only(folder: Path, ending: str) -> Path | None:
    found = sorted(path for path in folder.glob(f"*{ending}") if path.is_file())
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise ValueError(f"{folder}: several files *{ending} ({names}): keep one of them there")
    return found[0] if found else None


def elmo_settings(options: Path) -> dict[str, Any]:
    """The fields of an `ElmoConfig` in options.json.

    Errors: ValueError that names the file, for what is missing or cannot be computed here.
    """
    stored = read_json_object(options)
    try:
        lstm, characters = stored["lstm"], stored["char_cnn"]
        widths, filters = zip(*characters["filters"], strict=True)
        settings = {
            "hidden_size": 2 * int(lstm["projection_dim"]),
            "num_layers": int(lstm["n_layers"]),
            "intermediate_size": int(lstm["dim"]),
            "embedding_size": int(characters["embedding"]["dim"]),
            "filters": [int(count) for count in filters],
            "num_highways": int(characters["n_highway"]),
            "cell_clip": float(lstm["cell_clip"]),
            "projection_clip": float(lstm["proj_clip"]),
            "skip_connections": bool(lstm["use_skip_connections"]),
        }
        is_plain = list(widths) == [*range(1, 1 + len(widths))]
        activation = characters.get("activation", "relu")
        words = characters.get("max_characters_per_token", 50), characters["n_characters"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{options}: no options of an ELMo with a character CNN ({error!r})"
        ) from error
    if not is_plain or activation != "relu" or words not in ((50, NUMBERS - 1), (50, NUMBERS)):
        raise ValueError(
            f"{options}: bertsmith has only relu, filters of the widths 1, 2, 3 ..., 50 characters "
            f"a word, and {NUMBERS} characters"
        )
    return settings


def read_hdf5(file: Path, options: Path) -> dict[str, np.ndarray]:
    """The tensors by their canonical names, of PyTorch's layout, float32.

    Errors: ValueError that names the file, for another layout; ImportError without h5py.
    """
    h5py = _h5py(file)
    settings = elmo_settings(options)
    try:
        with h5py.File(file, "r") as stored:

            def read(name: str) -> np.ndarray:
                if name not in stored or not isinstance(stored[name], h5py.Dataset):
                    raise ValueError(
                        f"{file}: no dataset '{name}': not the weights of an ELMo as released, or "
                        f"not those of {options.name}"
                    )
                return np.asarray(stored[name], np.float32)

            return dict(_tensors(read, settings))
    except OSError as error:
        raise ValueError(f"{file}: no HDF5 file, or damaged: copy or download it again") from error


def _h5py(file: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"{file}: needs h5py: pip install 'bertsmith[lineage]'") from error
    return h5py


def _tensors(read: Callable[[str], np.ndarray], settings: dict[str, Any]) -> Any:
    """(Canonical name, tensor) of all that the options say."""
    characters = read("char_embed")
    # number 0, padding of rows, is never looked up
    yield "bert.embeddings.word_embeddings.weight", np.pad(characters, ((1, 0), (0, 0)))
    for number in range(len(settings["filters"])):
        ours, kernel = f"bert.embeddings.convolutions.{number}", read(f"CNN/W_cnn_{number}")
        yield f"{ours}.weight", kernel.reshape(-1, kernel.shape[-1]).T  # from [1, width, E, n]
        yield f"{ours}.bias", read(f"CNN/b_cnn_{number}")
    for number in range(settings["num_highways"]):
        ours, theirs = f"bert.embeddings.highways.{number}", f"CNN_high_{number}"
        parts = "carry", "transform"
        weights = [read(f"{theirs}/W_{part}") for part in parts]
        yield f"{ours}.weight", np.concatenate(weights, axis=1).T
        yield f"{ours}.bias", np.concatenate([read(f"{theirs}/b_{part}") for part in parts])
    yield "bert.embeddings.project.weight", read("CNN_proj/W_proj").T
    yield "bert.embeddings.project.bias", read("CNN_proj/b_proj")
    for number in range(settings["num_layers"]):
        for direction, name in enumerate(("ahead", "back")):
            theirs = f"RNN_{direction}/RNN/MultiRNNCell/Cell{number}/LSTMCell"
            ours = f"bert.encoder.layer.{number}.{name}"
            inputs, state = np.split(_gates(read(f"{theirs}/W_0").T), 2, axis=1)
            yield f"{ours}.inputs.weight", inputs
            yield f"{ours}.inputs.bias", _gates(read(f"{theirs}/B"))
            yield f"{ours}.state.weight", state
            yield f"{ours}.project.weight", read(f"{theirs}/W_P_0").T


def _gates(values: np.ndarray) -> np.ndarray:
    """[4C, ...] from TensorFlow's order of gates to PyTorch's."""
    return np.concatenate([np.split(values, 4)[place] for place in GATES])
