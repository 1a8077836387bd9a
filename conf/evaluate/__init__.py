"""The bodies of `python eval.py eval=...`: composition roots that wire data, policies and environments."""
