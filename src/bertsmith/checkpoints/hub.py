"""MODEL on the command line -> a folder: a run, Hugging Face's, Google's, or a hub name's."""

from __future__ import annotations

import re
from pathlib import Path

from bertsmith.base.files import nearby
from bertsmith.checkpoints.config_json import CONFIG_FILE, config_path
from bertsmith.checkpoints.stored import WEIGHTS

HUB_FILES = [  # never the weights of other frameworks
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",  # these say how a model of sentence-transformers makes its vectors
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/*.safetensors",
    "added_tokens.json",
]
PICKLED_FILES = [  # of a model without safetensors
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*.bin",
]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def open_model_folder(name: str | Path) -> Path:
    """The folder of that name, else of the hub's model, downloaded or from the hub's cache.

    `name@revision` takes a branch, a tag or a commit of the hub's model. Environment variables:
    HF_TOKEN, HF_HUB_OFFLINE (the cache alone) and HF_ENDPOINT (another hub).

    Errors: ValueError for no such folder, model or revision, or one that is not for everybody;
    FileNotFoundError when the hub cannot be reached and its cache does not have the whole model.
    """
    if not str(name):
        raise ValueError("model '': name a folder or a model of the hub; the current folder is '.'")
    folder = Path(name)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists() and (folder / "run.json").exists():
            if (folder / WEIGHTS).exists():
                raise ValueError(
                    f"{folder}: its model is no encoder of texts, but translates: use `bertsmith "
                    "lineage translate`"
                )
            raise ValueError(f"{folder}: no model in this run yet: let it train to its end")
        config_path(folder)
        return folder
    if folder.exists():
        raise ValueError(f"{folder}: a file, not a model: name the folder that holds it")
    if not HUB_NAME.fullmatch(str(name)):
        raise ValueError(f"{folder}: no such folder{nearby(folder, 'config.json')}")
    return _download(str(name))


def _download(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (requests or httpx, by version)
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, near = constants.ENDPOINT, nearby(Path(name), "config.json")
    model, _, revision = name.partition("@")
    try:
        folder = Path(snapshot_download(model, revision=revision or None, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):  # the same commit, whatever came since
            snapshot_download(model, revision=folder.name, allow_patterns=PICKLED_FILES)
        return folder
    except GatedRepoError as error:  # one of the next kind, too
        raise ValueError(f"{name}: accept the model's terms at {hub}, and {LOG_IN}") from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{name}: {hub} has the model, but no branch, tag or commit '{revision}' of it"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{name}: neither a folder here nor a model that {hub} has{near}; if it is private, "
            f"{LOG_IN}"
        ) from error
    except (LocalEntryNotFoundError, HTTPError) as error:
        if (status := _status(error)) == 401:
            raise ValueError(f"{name}: {hub} refuses your token: {LOG_IN}") from error
        where = f"no folder here{near}"
        if hasattr(error, "snapshot_path"):  # IncompleteSnapshotError of newer versions
            where = "only a part of it was downloaded"
        if constants.HF_HUB_OFFLINE:
            why = f"HF_HUB_OFFLINE keeps it from {hub}: download it first"
        elif status:
            why = f"{hub} answered with error {status}: try again later"
        elif isinstance(error, LocalEntryNotFoundError):
            why = f"{hub} cannot be reached: check name and network"
        else:
            why = f"the transfer from {hub} broke off: repeat the command"
        raise FileNotFoundError(f"{name}: {where}, and {why}") from error


def _status(error: BaseException | None) -> int | None:
    """The status of the hub's answer that led to an error; None without an answer."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return response.status_code
        error = error.__cause__
    return None
