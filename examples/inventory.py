"""A small stock ledger; the file that `pause_and_resume.py` hands to the model as a tool's output."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Movement:
    item: str
    quantity: int
    place: str


def read_movements(path: Path) -> list[Movement]:
    with path.open(newline="") as file:
        return [Movement(row["item"], int(row["quantity"]), row["place"]) for row in csv.DictReader(file)]


def stock_by_place(movements: list[Movement]) -> dict[str, dict[str, int]]:
    stock: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for movement in movements:
        stock[movement.place][movement.item] += movement.quantity
    return {place: dict(items) for place, items in stock.items()}


def shortages(stock: dict[str, dict[str, int]], minimum: dict[str, int]) -> list[tuple[str, str, int]]:
    missing = []
    for place, items in sorted(stock.items()):
        for item, wanted in sorted(minimum.items()):
            have = items.get(item, 0)
            if have < wanted:
                missing.append((place, item, wanted - have))
    return missing


def transfer(stock: dict[str, dict[str, int]], item: str, quantity: int, source: str, target: str) -> None:
    have = stock.get(source, {}).get(item, 0)
    if quantity > have:
        raise ValueError(f"{source} holds {have} of {item}, not {quantity}")
    stock[source][item] = have - quantity
    stock.setdefault(target, {})[item] = stock.get(target, {}).get(item, 0) + quantity
