"""The toy task of the folder above."""

from ....finetuning.conftest import model_folder, toy, trainer  # noqa: F401
