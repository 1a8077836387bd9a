"""Close names for a word that was probably mistyped."""

import difflib
from collections.abc import Iterable


def close_names(word: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Up to `count` of the known names that look like `word`, most alike first.

    Dotted names are also compared by their last part, so a right name in a wrong place is found.

    >>> close_names("model.net.num_layer", ["model.net.num_layers", "seed"])
    ['model.net.num_layers']
    >>> close_names("batchsize", ["data.batch_size", "seed"])
    ['data.batch_size']
    """
    names = sorted(set(known))
    found = difflib.get_close_matches(word, names, n=count, cutoff=0.75)
    last = word.rsplit(".", 1)[-1]
    by_last: dict[str, list[str]] = {}
    for name in names:
        by_last.setdefault(name.rsplit(".", 1)[-1], []).append(name)
    for match in difflib.get_close_matches(last, by_last, n=count, cutoff=0.75):
        found += sorted(by_last[match], key=len)
    return list(dict.fromkeys(found))[:count]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'a' or 'b'?` or nothing, to be put behind a message.

    >>> did_you_mean("trian", ["train", "eval"])
    ", did you mean 'train'?"
    >>> did_you_mean("xyz", ["train"])
    ''
    """
    found = close_names(word, known)
    return ", did you mean " + " or ".join(repr(name) for name in found) + "?" if found else ""
