"""Hashes of a rubric and of its items. Layers 1 and 2 check every item again, which costs little; the hash of an item
says whether its verdict can differ. What a model is asked again is not decided here."""

import hashlib

import msgspec

from grader.rubric.schema import Item, Rubric


def item_hash(rubric: Rubric, item: Item) -> str:
    """All that can change the item's verdict. Its title, its group and its feedback cannot."""
    runs = (rubric.rerun, rubric.limits if rubric.rerun else None)
    core = msgspec.structs.replace(item, title="", group="", feedback="")
    return _digest((core, rubric.language, rubric.point_step, runs))


def rubric_hash(rubric: Rubric) -> str:
    return _digest(rubric)


def changed_items(old: Rubric, new: Rubric) -> frozenset[str]:
    """Ids of the new rubric's items whose verdict can differ. Caps, late policy and letters change no verdict."""
    before = {item.id: item_hash(old, item) for item in old.items}
    return frozenset(item.id for item in new.items if before.get(item.id) != item_hash(new, item))


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
