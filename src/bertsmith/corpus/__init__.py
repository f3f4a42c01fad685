"""Raw text -> token store (`build/`, `store/`) -> pre-training batches as arrays (`examples/`)."""
