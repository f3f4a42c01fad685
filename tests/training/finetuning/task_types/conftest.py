"""The toy task of the folder above."""

from ....finetuning.conftest import job, model_folder, toy  # noqa: F401
