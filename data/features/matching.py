"""Which directory of features or imagined plans belongs to which source of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data.dataset import ChosenShards
from data.features.layout import shards_hash
from data.features.plans import ImaginedPlans, plans_key
from data.features.reader import FeatureSet
from data.views.base import FollowsPlans, PlanView, View
from memer.errors import UsageError


def use_features(view: View, chosen: Mapping[str, ChosenShards], sets: Sequence[FeatureSet]) -> None:
    """Give a view the features of each source, found by the content of its shards."""
    if not isinstance(view, PlanView):
        raise UsageError("data.features: samples of this view hold no latents; leave it out")
    view.features = _matched(chosen, sets, view.feature_key())


def use_plans(
    view: View, chosen: Mapping[str, ChosenShards], sets: Sequence[ImaginedPlans]
) -> dict[str, Any]:
    """Give a view the imagined plans of each source, if it shows any.

    Returns:
        What was chosen, for the run's records and for a resume; nothing where plans are real.
    """
    source = view.plan_source if isinstance(view, FollowsPlans) else "real"
    if not sets and source == "real":
        return {}
    if source == "real" or not isinstance(view, FollowsPlans):
        raise UsageError(
            "data.plans: samples of this view show real plans; set view.plan_source, or leave it"
        )
    if not sets:
        raise UsageError(
            f"data.plans: missing, view.plan_source is {source}; python -m data.build stage=plans makes them"
        )
    if getattr(view, "features", None):
        raise UsageError(
            "data.features: hold the latents of real plans; leave them out, or set view.plan_source=real"
        )
    found = _matched(chosen, sets, plans_key(view.plan))
    unused = [made.root for made in sets if made not in found.values()]
    if unused:
        raise UsageError(f"data.plans: {unused[0]} was made from none of the training shards; leave it out")
    view.imagined = found
    makers = {name: made.manifest["world_model"] for name, made in found.items()}
    return {"plan_source": source, "plans": makers}


Made = TypeVar("Made", FeatureSet, ImaginedPlans)


def _matched(
    chosen: Mapping[str, ChosenShards], sets: Sequence[Made], key: Mapping[str, Any]
) -> dict[str, Made]:
    """The directory of each source, found by the content of its shards and checked."""
    found: dict[str, Made] = {}
    for name, source in chosen.items():
        whole = {"shards": shards_hash(source.shards), **key}
        same = [made for made in sets if made.manifest["key"]["shards"] == whole["shards"]]
        if len(same) > 1:
            raise UsageError(
                f"{same[0].root} and {same[1].root} were made from the same shards, {source.shards.root}; "
                "name one of them"
            )
        # Without a match the check names the field, of the only directory or of the first.
        found[name] = (same or list(sets))[0]
        found[name].check(whole, episodes=source.episodes)
    return found


def listed(roots: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Directories as a user names them: none, one or several."""
    if roots is None:
        return []
    several = isinstance(roots, Sequence) and not isinstance(roots, str)
    return [str(root) for root in (roots if several else [roots])]
