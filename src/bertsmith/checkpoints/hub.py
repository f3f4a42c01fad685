"""MODEL on the command line -> a folder: a run, Hugging Face's, Google's, or a hub name's."""

from __future__ import annotations

import re
from pathlib import Path

from bertsmith.base.settings import nearest
from bertsmith.checkpoints.config_json import CONFIG_FILE, config_path
from bertsmith.checkpoints.run_folder import SETTINGS_FILE

HUB_FILES = [  # never the pickled weights, nor those of other frameworks
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "vocab.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",  # these say how a model of sentence-transformers makes its vectors
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/*.safetensors",
    "added_tokens.json",
]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def open_model_folder(name: str | Path) -> Path:
    """The folder of that name, else of the hub's model, downloaded or from the hub's cache.

    The environment variable HF_ENDPOINT names another hub. Errors: ValueError for no such folder or
    model, or one that is not for everybody; FileNotFoundError when the hub cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists() and (folder / SETTINGS_FILE).exists():
            raise ValueError(f"{folder}: no model in this run yet: let it train to its end")
        config_path(folder)
        return folder
    if folder.exists():
        raise ValueError(f"{folder}: a file, not a model: name the folder that holds it")
    if not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{folder}: no such folder{_near_model(folder)}")
    return _download(str(name))


def _near_model(folder: Path) -> str:
    """The end of a message: a folder with a model and nearly the same name, if there is one."""
    hint = nearest(folder.name, [file.parent.name for file in folder.parent.glob("*/config.json")])
    return f" ({hint})" if hint.startswith("did you mean") else ""


def _download(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (requests or httpx, by version)
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub, near = constants.ENDPOINT, _near_model(Path(name))
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except GatedRepoError as error:  # one of the next kind, too
        raise ValueError(
            f"{name}: accept the model's terms at {hub}, and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{name}: neither a folder here nor a model that {hub} has{near}"
        ) from error
    except (LocalEntryNotFoundError, HTTPError) as error:
        raise FileNotFoundError(
            f"{name}: no folder here{near}, and {hub} cannot be reached: check name and network"
        ) from error
